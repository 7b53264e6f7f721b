"""What router and hand-off add: `python -m bench.overhead`.

In one run, on the same cores: the engine alone in this process (`bench.inprocess`), the same
prompts through router, prefill and decode worker, and the engine again. Inter-token latency is taken at the client,
only while all streams run: a message's gap divided by the tokens it brings. Added per token = its
median (and its mean) minus the engine's step at the same batch. Both sides compute with the same
number of threads. Prefix caches are off, since the prompts are asked again and again.
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

from bench.inprocess import run_batch
from bench.support.cluster import serve
from engine.loading import load_engine
from shell.config import WorkerConfig
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

    arrivals: tuple[tuple[float, int], ...]
    """When each message came (on this process's clock) and how many tokens it brought."""
    first_token_s: float
    timings: Timings

    def gaps_s(self, start_s: float, end_s: float) -> list[float]:
        """Seconds per token, one entry per token that came within the window."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return [
            (now_s - before_s) / num_tokens
            for (before_s, _), (now_s, num_tokens) in pairs
            if start_s <= before_s and now_s <= end_s
            for _ in range(num_tokens)
        ]


@dataclass(frozen=True, slots=True)
class Report:
    """All times in milliseconds, medians; ratios and differences within this run."""

    shape: Shape
    threads: int
    engine_step_ms: float
    served_inter_token_ms: float
    added_per_token_p50_ms: float
    added_per_token_mean_ms: float
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
    sent_s = time.perf_counter()
    arrivals: list[tuple[float, int]] = []
    token_ids: list[int] = []
    timings = None
    stream = client.generate(token_ids=prompt, max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    async for update in stream:
        if update.token_ids:
            arrivals.append((time.perf_counter(), len(update.token_ids)))
        token_ids += update.token_ids
        timings = update.timings or timings
    if timings is None or len(token_ids) != output_tokens:
        raise RuntimeError(f"the stream ended after {len(token_ids)} of {output_tokens} tokens")
    return Stream(tuple(arrivals), arrivals[0][0] - sent_s, timings), token_ids


def gaps_together(streams: Sequence[Stream]) -> list[float]:
    """Seconds per token of all streams while all of them ran."""
    start_s = max(stream.arrivals[0][0] for stream in streams)
    end_s = min(stream.arrivals[-1][0] for stream in streams)
    return [gap for stream in streams for gap in stream.gaps_s(start_s, end_s)]


async def measure_served(target: str, prompts: Prompts, shape: Shape) -> tuple[list[Stream], list[float], list[int]]:
    """Streams one after the other, seconds per token of streams together, and one completion."""
    async with AsyncClient(target) as client:
        await client.wait_ready(timeout_s=60)
        await asyncio.gather(*(run_stream(client, prompt, 8) for prompt in prompts))  # warm
        alone = [await run_stream(client, prompts[0], shape.output_tokens) for _ in range(shape.repeats)]
        gaps: list[float] = []
        for _ in range(shape.repeats):
            results = await asyncio.gather(*(run_stream(client, prompt, shape.output_tokens) for prompt in prompts))
            gaps += gaps_together([stream for stream, _ in results])
        return [stream for stream, _ in alone], gaps, alone[0][1]


def measure_engine(model: str, prompts: Prompts, shape: Shape, threads: int) -> tuple[float, float, list[int]]:
    """Median step at the full batch, median first token of one prompt, one completion."""
    all_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(all_cores)[-threads:])  # the whole process, as `tandem serve` pins a worker
    engine = load_engine(WorkerConfig(model=model, max_seqs=shape.streams, threads=threads))
    try:
        run_batch(engine, prompts, 8, 512)  # warm
        steps = [run_batch(engine, prompts, shape.output_tokens, 512).step_s for _ in range(shape.repeats)]
        alone = [run_batch(engine, prompts[:1], shape.output_tokens, 512) for _ in range(shape.repeats)]
        step_s = statistics.median(step for run in steps for step in run)
        return step_s, statistics.median(run.first_token_s for run in alone), list(alone[0].token_ids[0])
    finally:
        engine.close()
        os.sched_setaffinity(0, all_cores)


def measure(model: str, shape: Shape, threads: int, seed: int) -> Report:
    """Engine, served, engine again: the faster engine counts, so that noise never flatters the service."""
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(4, 256) for _ in range(shape.prompt_tokens)) for _ in range(shape.streams)]
    before = measure_engine(model, prompts, shape, threads)
    with serve(model, "--prefill", "1", "--decode", "1", "--threads", str(threads), "--no-prefix-cache") as cluster:
        alone, gaps, served_tokens = asyncio.run(measure_served(cluster.target, prompts, shape))
    after = measure_engine(model, prompts, shape, threads)
    engine_step_s, engine_first_s = min(before[0], after[0]), min(before[1], after[1])
    served_gap_s = statistics.median(gaps)
    served_first_s = statistics.median(stream.first_token_s for stream in alone)
    transfer_s = statistics.median(stream.timings.transfer_s for stream in alone)
    transfer_bytes = alone[0].timings.transfer_bytes
    return Report(
        shape=shape,
        threads=threads,
        engine_step_ms=engine_step_s * 1e3,
        served_inter_token_ms=served_gap_s * 1e3,
        added_per_token_p50_ms=(served_gap_s - engine_step_s) * 1e3,
        added_per_token_mean_ms=(statistics.fmean(gaps) - engine_step_s) * 1e3,
        engine_first_token_ms=engine_first_s * 1e3,
        served_first_token_ms=served_first_s * 1e3,
        added_to_first_token_ms=(served_first_s - engine_first_s) * 1e3,
        worker_prefill_ms=statistics.median(stream.timings.prefill_s for stream in alone) * 1e3,
        transfer_bytes=transfer_bytes,
        transfer_ms=transfer_s * 1e3,
        transfer_gb_per_s=transfer_bytes / transfer_s / 1e9 if transfer_s else 0.0,
        tokens_equal=served_tokens == before[2],
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
