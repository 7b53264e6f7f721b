"""A decoder small enough to know by heart: it adds up the tokens it can see in the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch

from engine.kv_cache import KvCache
from engine.sequence import Sequence
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
