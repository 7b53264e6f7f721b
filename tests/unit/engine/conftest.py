"""A decoder small enough to know by heart: it adds up the tokens it can see in the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch

from engine.block_pool import BlockPool
from engine.group import Group
from engine.kv_cache import KvCache
from engine.prefix_cache import PrefixCache
from engine.runner import Runner
from engine.sequence import Sequence
from engine.step import Sampled, Step
from kernels.compiled_step import StepInputs
from tandem.kv_layout import DType, KvLayout
from tandem.types import SamplingParams, TokenId

VOCAB_SIZE = 97


class SumDecoder:
    """The next token is the sum of all tokens so far, modulo the vocabulary.

    It stores each token id in its slot and reads every earlier one back through the block
    table, so a wrong slot, position, length or table gives a wrong token.
    """

    def __init__(self) -> None:
        self.num_projected_rows: list[int] = []

    def forward(self, step: StepInputs) -> torch.Tensor:
        return self.project(self.hidden(step))

    def hidden(self, step: StepInputs) -> torch.Tensor:
        token_ids, positions, kv_cache, metadata, rows = step
        block_size = kv_cache.shape[4]
        slots = kv_cache[:, 0, 0, 0, :, 0]  # [N, S]
        slots[metadata.slot_mapping // block_size, metadata.slot_mapping % block_size] = token_ids.float()
        sums = torch.empty(len(token_ids))
        starts = metadata.cu_seqlens_q.tolist()
        for seq, (start, end) in enumerate(pairwise(starts)):
            assert end - start == metadata.query_lens_host[seq]
            for token in range(start, end):
                position = int(positions[token])
                assert position == metadata.seq_lens_host[seq] - (end - token)
                blocks = metadata.block_tables[seq, : position // block_size + 1].long()
                sums[token] = slots[blocks].flatten()[: position + 1].sum()
        return sums[rows, None]

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        self.num_projected_rows.append(len(hidden))
        return -(torch.arange(VOCAB_SIZE) - hidden % VOCAB_SIZE).abs()


@pytest.fixture
def decoder() -> SumDecoder:
    return SumDecoder()


@pytest.fixture
def kv_cache() -> Iterator[KvCache]:
    cache = KvCache.create(KvLayout(1, 1, 4, 2, DType.FLOAT32), 64, torch.device("cpu"))
    cache.fill_poison()
    yield cache
    cache.close()


@pytest.fixture
def make_seq() -> Callable[..., Sequence]:
    def make(token_ids: tuple[int, ...] = (1, 2, 3), output: tuple[int, ...] = (), index=0, **sampling) -> Sequence:
        """`output` has been drawn elsewhere."""
        params = SamplingParams(**{"max_tokens": 16, "temperature": 0.0, **sampling})
        return Sequence(index, params, tuple(map(TokenId, token_ids)), map(TokenId, output))

    return make


class GroupDriver:
    """Takes steps of one group: copies, blocks and tokens of at most `seqs_per_step` seqs in each."""

    def __init__(self, runner: Runner, pool: BlockPool, seqs_per_step: int = 99) -> None:
        self._runner = runner
        self._pool = pool
        self._cache = PrefixCache(pool, enabled=False)
        self._seqs_per_step = seqs_per_step
        self.most_live = 0

    def run(self, group: Group) -> list[tuple[Sequence, tuple[Sequence, ...], tuple[Sampled, ...]]]:
        """Returns each seq of the step, who drew from it, and what."""
        seqs = [each for each in group.running if not each.num_pending_tokens][: self._seqs_per_step]
        drawers, copies, scheduled = [each.drawers for each in seqs], [], []
        for seq in seqs:
            copies += group.copy_on_write(seq, self._cache)
            seq.add_blocks(self._pool.allocate(seq.blocks_wanted(seq.num_remaining_tokens, self._pool.block_size)))
            scheduled.append(seq.schedule(seq.num_remaining_tokens))
        outputs = self._runner.run(Step(tuple(scheduled), copies=tuple(copies))).outputs
        self.most_live = max(self.most_live, self._pool.counts().live)
        return list(zip(seqs, drawers, outputs, strict=True))

    def preempt(self, group: Group) -> None:
        for table in group.take_blocks():
            self._pool.release(table)
        self._pool.assert_idle()


@pytest.fixture
def pool(kv_cache: KvCache) -> BlockPool:
    return BlockPool(kv_cache.num_blocks, kv_cache.layout.block_size)
