"""What router and hand-off add: `python -m bench.overhead`.

In one run, on the same cores: the engine alone in this process (`bench.inprocess`), then the
same prompts through router, prefill and decode worker. Added per token = the client's median
inter-token latency minus the engine's median step at the same batch. Both sides use as many
compute threads as `tandem serve` gives a decode worker here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bench.cluster import serve
from bench.inprocess import run_batch
from engine.loading import EngineOptions, load_engine
from engine.placement import ThreadPlacement
from tandem.checkpoint import resolve_model
from tandem.client import AsyncClient, Timings

Prompts = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Shape:
    """The work."""

    streams: int
    prompt_tokens: int
    output_tokens: int
    repeats: int


@dataclass(frozen=True, slots=True)
class Stream:
    """One served request as its client saw it."""

    gaps_s: tuple[float, ...]
    """Between messages, divided by the tokens that the later one brought."""
    first_token_s: float
    timings: Timings


@dataclass(frozen=True, slots=True)
class Report:
    """All times in milliseconds, medians; ratios and differences within this run."""

    shape: Shape
    threads: int
    engine_step_ms: float
    served_inter_token_ms: float
    added_per_token_ms: float
    engine_first_token_ms: float
    served_first_token_ms: float
    added_to_first_token_ms: float
    worker_prefill_ms: float
    transfer_bytes: int
    transfer_ms: float
    transfer_gb_per_s: float
    tokens_equal: bool
    """Whether the served tokens of the single stream are the engine's."""


async def run_stream(client: AsyncClient, prompt: tuple[int, ...], output_tokens: int) -> tuple[Stream, list[int]]:
    """One greedy request, timed at the client."""
    sent_s = last_s = time.perf_counter()
    gaps: list[float] = []
    token_ids: list[int] = []
    first_token_s, timings = 0.0, None
    stream = client.generate(token_ids=prompt, max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    async for update in stream:
        now_s = time.perf_counter()
        if update.token_ids and not token_ids:
            first_token_s = now_s - sent_s
        elif update.token_ids:
            gaps += [(now_s - last_s) / len(update.token_ids)] * len(update.token_ids)
        last_s = now_s
        token_ids += update.token_ids
        timings = update.timings or timings
    if timings is None or len(token_ids) != output_tokens:
        raise RuntimeError(f"the stream ended after {len(token_ids)} of {output_tokens} tokens")
    return Stream(tuple(gaps), first_token_s, timings), token_ids


async def measure_served(target: str, prompts: Prompts, shape: Shape) -> tuple[list[Stream], list[Stream], list[int]]:
    """Streams one after the other (for the first token), streams together (for the others), one completion."""
    async with AsyncClient(target) as client:
        await client.wait_ready(timeout_s=60)
        await asyncio.gather(*(run_stream(client, prompt, 8) for prompt in prompts))  # warm
        alone = [await run_stream(client, prompts[0], shape.output_tokens) for _ in range(shape.repeats)]
        together: list[Stream] = []
        for _ in range(shape.repeats):
            results = await asyncio.gather(*(run_stream(client, prompt, shape.output_tokens) for prompt in prompts))
            together += [stream for stream, _ in results]
        return [stream for stream, _ in alone], together, alone[0][1]


def measure_engine(model: str, prompts: Prompts, shape: Shape, threads: int) -> tuple[float, float, list[int]]:
    """Median step at the full batch, median first token of one prompt, one completion."""
    cores = frozenset(sorted(os.sched_getaffinity(0))[-threads:])
    options = EngineOptions(
        model_path=resolve_model(model), max_seqs=shape.streams, placement=ThreadPlacement(threads, cores)
    )
    engine = load_engine(options)
    try:
        run_batch(engine, prompts, 8, 512)  # warm
        steps = [run_batch(engine, prompts, shape.output_tokens, 512).step_s for _ in range(shape.repeats)]
        alone = [run_batch(engine, prompts[:1], shape.output_tokens, 512) for _ in range(shape.repeats)]
        step_s = statistics.median(step for run in steps for step in run)
        return step_s, statistics.median(run.first_token_s for run in alone), list(alone[0].token_ids[0])
    finally:
        engine.close()


def measure(model: str, shape: Shape, threads: int, seed: int) -> Report:
    """Engine first, then served."""
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(4, 256) for _ in range(shape.prompt_tokens)) for _ in range(shape.streams)]
    engine_step_s, engine_first_s, engine_tokens = measure_engine(model, prompts, shape, threads)
    with serve(model, "--prefill", "1", "--decode", "1", "--threads", str(threads)) as cluster:
        alone, together, served_tokens = asyncio.run(measure_served(cluster.target, prompts, shape))
    served_gap_s = statistics.median(gap for stream in together for gap in stream.gaps_s)
    served_first_s = statistics.median(stream.first_token_s for stream in alone)
    transfer_s = statistics.median(stream.timings.transfer_s for stream in alone)
    transfer_bytes = alone[0].timings.transfer_bytes
    return Report(
        shape=shape,
        threads=threads,
        engine_step_ms=engine_step_s * 1e3,
        served_inter_token_ms=served_gap_s * 1e3,
        added_per_token_ms=(served_gap_s - engine_step_s) * 1e3,
        engine_first_token_ms=engine_first_s * 1e3,
        served_first_token_ms=served_first_s * 1e3,
        added_to_first_token_ms=(served_first_s - engine_first_s) * 1e3,
        worker_prefill_ms=statistics.median(stream.timings.prefill_s for stream in alone) * 1e3,
        transfer_bytes=transfer_bytes,
        transfer_ms=transfer_s * 1e3,
        transfer_gb_per_s=transfer_bytes / transfer_s / 1e9 if transfer_s else 0.0,
        tokens_equal=served_tokens == engine_tokens,
    )


def main() -> int:
    """Prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    shape = Shape(args.streams, args.prompt_tokens, args.output_tokens, args.repeats)
    print(json.dumps(asdict(measure(args.model, shape, args.threads, args.seed)), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
