"""Times single engine steps of one model over a pool of random KV, at any batch, context and block size.

No scheduler, no sampling surprises: what a step costs by itself. Block tables are shuffled, as
they are in a pool that has been in use.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.kv_cache import KvCache
from engine.runner import Runner
from engine.sampler import TORCH_DRAWS, Draws
from engine.step import SampleSpec, ScheduledSeq
from models.loading import LoadedModel
from tandem.types import BlockId, SamplingParams, TokenId

_GREEDY = SampleSpec(SamplingParams(max_tokens=1, temperature=0.0), choice_index=0, output_index=0)


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one kind of step, over its repeats; seconds."""

    median_s: float
    best_s: float


class StepTimer:
    """Steps `model` over a pool of its own, large enough for `num_tokens` token slots."""

    def __init__(self, model: LoadedModel, block_size: int, num_tokens: int, draws: Draws = TORCH_DRAWS) -> None:
        self._vocab_size = model.config.vocab_size
        self._block_size = block_size
        self._kv = KvCache.create(model.kv_layout(block_size), -(-num_tokens // block_size), model.device)
        self._kv.tensor.normal_()
        self._runner = Runner(model.decoder, self._kv, draws=draws)
        self._cuda = model.device.type == "cuda"

    def decode(self, batch: int, context: int, repeats: int = 9) -> Timing:
        """One token for each of `batch` seqs that have `context` tokens already."""
        return self._time(self._seqs(batch, context, 1), repeats)

    def prefill(self, batch: int, context: int, query: int, repeats: int = 3) -> Timing:
        """A chunk of `query` tokens for each of `batch` seqs that have `context` tokens already."""
        return self._time(self._seqs(batch, context, query), repeats)

    def close(self) -> None:
        """Gives the pool back."""
        self._kv.close()

    def _seqs(self, batch: int, context: int, query: int) -> list[ScheduledSeq]:
        each = -(-(context + query) // self._block_size)
        order = random.Random(0).sample(range(self._kv.num_blocks), batch * each)
        tokens = [random.Random(1).randrange(self._vocab_size) for _ in range(query)]
        return [
            ScheduledSeq(
                token_ids=tuple(TokenId(token) for token in tokens),
                context_len=context,
                block_table=tuple(BlockId(block) for block in order[seq * each : (seq + 1) * each]),
                sample=_GREEDY,
            )
            for seq in range(batch)
        ]

    def _time(self, seqs: Sequence[ScheduledSeq], repeats: int) -> Timing:
        self._step(seqs)
        times = [self._step(seqs) for _ in range(repeats)]
        return Timing(statistics.median(times), min(times))

    def _step(self, seqs: Sequence[ScheduledSeq]) -> float:
        began_s = time.perf_counter()
        self._runner.step(seqs)
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - began_s
