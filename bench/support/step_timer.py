"""Times single engine steps of one model over a pool of random KV, at any batch, context and block size.

No scheduler, no sampling surprises: what a step costs by itself. Block tables are shuffled, as
they are in a pool that has been in use.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass

import torch

from bench.support.timing import Call
from engine.draws import SampleSpec
from engine.kv_cache import KvCache
from engine.runner import Runner
from engine.step import DecodeRows, ScheduledSeq, Step
from kernels.operations import Kernels
from models.loading import LoadedModel
from tandem.kv_layout import QuantDType
from tandem.types import BlockId, SamplingParams, TokenId

_SCALE, _LARGEST = 1 / 32, 127
"""Of quantised KV."""
_GREEDY = SampleSpec(SamplingParams(max_tokens=1, temperature=0.0), output_index=0)


def two_in_flight(runner: Runner, step: Step) -> Call:
    """Launches a step that the one before it feeds, then waits for that one, as a decode worker does."""
    fed = Step((), rows=DecodeRows.of(step.chunks, feeds=range(len(step.chunks))))
    before = runner.launch(runner.prepare(step), None)

    def call() -> None:
        nonlocal before
        launched = runner.launch(runner.prepare(fed), before)
        runner.collect(before)
        before = launched

    return call


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one kind of step, over its repeats; seconds."""

    median_s: float
    best_s: float


class StepTimer:
    """Steps `model` over a pool of its own, large enough for `num_tokens` token slots."""

    def __init__(
        self,
        model: LoadedModel,
        block_size: int,
        num_tokens: int,
        kernels: Kernels,
        kv_dtype: QuantDType | None = None,
    ) -> None:
        """`kernels`: those that the model was loaded with. `kv_dtype` None: KV as it is computed."""
        self._vocab_size = model.config.vocab_size
        self._block_size = block_size
        self._kv = KvCache.create(model.kv_layout(block_size, kv_dtype), -(-num_tokens // block_size), model.device)
        if kv_dtype is None:
            self._kv.tensor.normal_()
        else:
            self._kv.blocks_view.view(torch.float32).fill_(_SCALE)
            for block in self._kv.tensor:
                block.copy_(torch.randn(block.shape).div_(_SCALE).clamp_(-_LARGEST, _LARGEST))
        self._runner = Runner(model.decoder, self._kv, kernels)

    def decode(self, batch: int, context: int, repeats: int = 9) -> Timing:
        """One token for each of `batch` seqs that have `context` tokens already."""
        return self._time(self.step(batch, context, 1), repeats)

    def prefill(self, batch: int, context: int, query: int, repeats: int = 3) -> Timing:
        """A chunk of `query` tokens for each of `batch` seqs that have `context` tokens already."""
        return self._time(self.step(batch, context, query), repeats)

    def close(self) -> None:
        """Gives the pool back."""
        self._kv.close()

    def step(self, batch: int, context: int, query: int) -> Step:
        """`query` tokens for each of `batch` seqs that have `context` tokens already, and a greedy draw each."""
        each = -(-(context + query) // self._block_size)
        order = random.Random(0).sample(range(self._kv.num_blocks), batch * each)
        tokens = [random.Random(1).randrange(self._vocab_size) for _ in range(query)]
        seqs = (
            ScheduledSeq(
                token_ids=tuple(TokenId(token) for token in tokens),
                context_len=context,
                block_table=tuple(BlockId(block) for block in order[seq * each : (seq + 1) * each]),
                samples=(_GREEDY,),
            )
            for seq in range(batch)
        )
        return Step(tuple(seqs))

    def run(self, step: Step) -> float:
        """Seconds that it takes."""
        began_s = time.perf_counter()
        self._runner.run(step)
        return time.perf_counter() - began_s

    def median_s(self, step: Step, repeats: int) -> float:
        """Of a step made from those of `step`."""
        return self._time(step, repeats).median_s

    def launch_s(self, step: Step, repeats: int = 9) -> float:
        """Median seconds for which the host lays the step out and launches it, with an idle device."""
        times = []
        for _ in range(repeats):
            began_s = time.perf_counter()
            launched = self._runner.launch(self._runner.prepare(step), None)
            times.append(time.perf_counter() - began_s)
            self._runner.collect(launched)
        return statistics.median(times)

    def _time(self, step: Step, repeats: int) -> Timing:
        self.run(step)
        times = [self.run(step) for _ in range(repeats)]
        return Timing(statistics.median(times), min(times))
