"""Continuous against static batching on one served model, and the pool's waste: `python -m bench.batching`.

Output lengths are exponentially distributed. The same requests run twice on the same cluster in
one run: continuously, a new request entering as soon as one ends; and in static batches, each
batch waiting for its longest. Meanwhile the decode worker's own accounting of unused slots is
read from its status. Prefix caches are off: the second run would find what the first one computed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bench.support.cluster import serve
from tandem.client import AsyncClient
from tandem.types import Role

PROMPT_TOKENS = 256
MAX_OUTPUT_TOKENS = 640
SAMPLE_S = 0.1


@dataclass(frozen=True, slots=True)
class Job:
    """One request: a prompt and how many tokens it is to bring."""

    prompt: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Result:
    """What one run of the script found."""

    requests: int
    batch_size: int
    mean_output_tokens: float
    continuous_tokens_per_s: float
    static_tokens_per_s: float
    continuous_over_static: float
    unused_slots_mean: float
    """Share of the slots in live blocks that hold no token, mean over samples with work."""
    unused_slots_max: float
    samples: int
    short_after_long_ended_first: bool


def exponential_jobs(seed: int, num_jobs: int, mean_output_tokens: float, vocab_size: int) -> list[Job]:
    """Random prompts of `PROMPT_TOKENS` ids, output lengths exponential and capped."""
    rng = random.Random(seed)
    return [
        Job(
            tuple(rng.randrange(4, vocab_size) for _ in range(PROMPT_TOKENS)),
            min(MAX_OUTPUT_TOKENS, 1 + int(rng.expovariate(1 / mean_output_tokens))),
        )
        for _ in range(num_jobs)
    ]


async def run_job(client: AsyncClient, job: Job) -> int:
    """Tokens generated; raises if it is not what was asked for."""
    done = await client.complete(token_ids=job.prompt, max_tokens=job.output_tokens, temperature=0.0, ignore_eos=True)
    if done.usage.completion_tokens != job.output_tokens:
        raise RuntimeError(f"asked for {job.output_tokens} tokens, got {done.usage.completion_tokens}")
    return done.usage.completion_tokens


async def run_continuous(client: AsyncClient, jobs: Sequence[Job], batch_size: int) -> float:
    """Tokens per second with `batch_size` requests in flight at any time."""
    slots = asyncio.Semaphore(batch_size)

    async def one(job: Job) -> int:
        async with slots:
            return await run_job(client, job)

    began_s = time.monotonic()
    tokens = await asyncio.gather(*(one(job) for job in jobs))
    return sum(tokens) / (time.monotonic() - began_s)


async def run_static(client: AsyncClient, jobs: Sequence[Job], batch_size: int) -> float:
    """Tokens per second when each batch of `batch_size` waits for its longest request."""
    began_s, tokens = time.monotonic(), 0
    for first in range(0, len(jobs), batch_size):
        batch = jobs[first : first + batch_size]
        tokens += sum(await asyncio.gather(*(run_job(client, job) for job in batch)))
    return tokens / (time.monotonic() - began_s)


async def unused_shares(client: AsyncClient, shares: list[float]) -> None:
    """Appends the decode pool's share of unused slots, again and again until cancelled."""
    while True:
        for worker in (await client.status()).workers:
            pool = worker.load.pool
            if worker.info.role == Role.DECODE and pool.live:
                shares.append(pool.unused_slots / (pool.live * pool.block_size))
        await asyncio.sleep(SAMPLE_S)


async def short_overtakes_long(client: AsyncClient, jobs: Sequence[Job]) -> bool:
    """Whether a short request sent after a long one ends first."""
    ended: list[str] = []

    async def one(name: str, job: Job) -> None:
        await run_job(client, job)
        ended.append(name)

    long = asyncio.create_task(one("long", Job(jobs[0].prompt, MAX_OUTPUT_TOKENS)))
    async for _ in client.generate(token_ids=jobs[1].prompt, max_tokens=1, ignore_eos=True):
        pass  # the long request has been taken in by now
    await one("short", Job(jobs[2].prompt, 8))
    await long
    return ended[0] == "short"


async def measure(target: str, num_jobs: int, batch_size: int, mean_output_tokens: float, seed: int) -> Result:
    """Runs both ways on the cluster at `target`."""
    async with AsyncClient(target) as client:
        await client.wait_ready(timeout_s=60)
        vocab_size = (await client.model()).vocab_size
        jobs = exponential_jobs(seed, num_jobs, mean_output_tokens, vocab_size)
        await run_continuous(client, jobs[:batch_size], batch_size)  # warm
        shares: list[float] = []
        watch = asyncio.create_task(unused_shares(client, shares))
        try:
            continuous = await run_continuous(client, jobs, batch_size)
        finally:
            watch.cancel()
        static = await run_static(client, jobs, batch_size)
        return Result(
            requests=num_jobs,
            batch_size=batch_size,
            mean_output_tokens=statistics.fmean(job.output_tokens for job in jobs),
            continuous_tokens_per_s=continuous,
            static_tokens_per_s=static,
            continuous_over_static=continuous / static,
            unused_slots_mean=statistics.fmean(shares),
            unused_slots_max=max(shares),
            samples=len(shares),
            short_after_long_ended_first=await short_overtakes_long(client, jobs),
        )


def main() -> int:
    """Serves a model, measures, prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--mean-output-tokens", type=float, default=128)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    options = (
        "--prefill",
        "1",
        "--decode",
        "1",
        "--no-prefix-cache",
        "--block-size",
        "16",
        "--max-seqs",
        str(args.batch_size),
    )
    with serve(args.model, *options) as cluster:
        result = asyncio.run(
            measure(cluster.target, args.requests, args.batch_size, args.mean_output_tokens, args.seed)
        )
    print(json.dumps(asdict(result), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
