"""How long the engine thread stands idle between decode steps: `python -m bench.step_gaps`.

The same seqs are decoded with one step in flight, each launched when the result of the one before has been
applied, and with two, each prepared and launched while the one before computes. Ratios within one run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass
from itertools import pairwise

import torch
import uvloop

from engine.engine_thread import EngineThread
from engine.forward import Forward
from engine.kv_cache import KvCache
from engine.loading import Engine, EngineOptions, load_engine
from engine.placement import ThreadPlacement, open_engine_executor
from engine.runner import Launched, Prepared, Runner
from engine.sequence import Sequence
from engine.step import BrokenLogits, Step, StepResult
from kernels.dispatch import AUTO, select_kernels
from kernels.operations import Kernels
from models.dtypes import torch_dtype
from tandem.checkpoint import resolve_model
from tandem.types import SamplingParams, TokenId

_PROMPT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Gaps:
    """Medians over the decode steps of one run; milliseconds."""

    in_flight: int
    idle_ms: float
    """From the end of one step's computation to the start of the next one's."""
    idle_p90_ms: float
    step_ms: float
    """From start to start."""
    prepare_ms: float


class TimedRunner(Runner):
    """Notes when launches begin and end."""

    def __init__(self, decoder: Forward, kv_cache: KvCache, kernels: Kernels) -> None:
        super().__init__(decoder, kv_cache, kernels)
        self.launches: list[tuple[float, float]] = []
        self.prepared_s: list[float] = []

    def prepare(self, step: Step) -> Prepared:
        """Timed."""
        began_s = time.perf_counter()
        prepared = super().prepare(step)
        self.prepared_s.append(time.perf_counter() - began_s)
        return prepared

    def launch(self, prepared: Prepared, previous: Launched | None) -> Launched:
        """Timed."""
        began_s = time.perf_counter()
        launched = super().launch(prepared, previous)
        self.launches.append((began_s, time.perf_counter()))
        return launched

    def gaps(self, in_flight: int) -> Gaps:
        """Over all but the first steps, which compute prompts."""
        launches = self.launches[len(self.launches) // 8 :]
        idle = [start - end for (_, end), (start, _) in pairwise(launches)]
        steps = [later - earlier for (earlier, _), (later, _) in pairwise(launches)]
        return Gaps(
            in_flight,
            statistics.median(idle) * 1e3,
            statistics.quantiles(idle, n=10)[-1] * 1e3,
            statistics.median(steps) * 1e3,
            statistics.median(self.prepared_s) * 1e3,
        )


async def decode(engine: Engine, thread: EngineThread, seqs: SequenceOf[Sequence], in_flight: int) -> None:
    """Decodes seqs of equal length to their end."""
    for seq in seqs:
        seq.add_blocks(engine.pool.allocate(seq.blocks_wanted(seq.num_tokens, engine.pool.block_size)))
        _apply([seq], await thread.launch(Step((seq.schedule(seq.num_tokens),))))
    flying: deque[asyncio.Task[StepResult]] = deque()
    while not seqs[0].is_finished:
        while len(flying) < in_flight and not seqs[0].is_exhausted:
            for seq in seqs:
                seq.add_blocks(engine.pool.allocate(seq.blocks_wanted(1, engine.pool.block_size)))
            flying.append(
                thread.launch(Step(tuple(seq.schedule(1, i if flying else None) for i, seq in enumerate(seqs))))
            )
        _apply(seqs, await flying.popleft())
    for seq in seqs:
        engine.pool.release(seq.take_blocks())


def _apply(seqs: SequenceOf[Sequence], result: StepResult) -> None:
    for seq, (sampled,) in zip(seqs, result.outputs, strict=True):
        assert not isinstance(sampled, BrokenLogits)
        seq.append_token(sampled[0].token_id)


def measure(model: str, num_seqs: int, num_tokens: int, threads: int) -> list[Gaps]:
    """One step in flight, then two; twice, the second time counts."""
    placement = ThreadPlacement(threads=threads)
    engine = load_engine(EngineOptions(model_path=resolve_model(model), max_seqs=num_seqs, placement=placement))
    kernels = select_kernels(AUTO, torch.device("cpu"), torch_dtype(engine.layout.dtype))
    rng = random.Random(0)
    found = []
    try:
        for in_flight in (1, 2, 1, 2):
            runner = TimedRunner(engine.model.decoder, engine.kv_cache, kernels)
            thread = EngineThread(runner, open_engine_executor(placement))
            params = SamplingParams(max_tokens=num_tokens, temperature=0.0)
            prompts = [tuple(TokenId(rng.randrange(4, 256)) for _ in range(_PROMPT_TOKENS)) for _ in range(num_seqs)]
            seqs = [Sequence(index, params, prompt) for index, prompt in enumerate(prompts)]
            uvloop.run(decode(engine, thread, seqs, in_flight))
            thread.close()
            runner.launches = runner.launches[num_seqs:]
            runner.prepared_s = runner.prepared_s[num_seqs:]
            found.append(runner.gaps(in_flight))
    finally:
        engine.close()
    return found[2:]


def main() -> int:
    """Prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--seqs", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    print(json.dumps([asdict(each) for each in measure(args.model, args.seqs, args.tokens, args.threads)], indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
