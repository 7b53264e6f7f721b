"""The claims of the README, each taken again by one command: `python -m bench.claims [NAME …]`.

    batching    continuous against static batching of the same requests, and the pool's unused slots
    sharing     blocks of n choices or beams of one request against n requests, and what a full pool serves of each
    small_pool  callers who want four times what the pool holds: every answer is that of a quiet run
    scaling     1+1 workers to 2+2 and back, then a restart of everything: no request lost, no token wrong
    burst       gaps of running streams while long prompts arrive, prefill and decode apart
    prefix      first tokens of prompts that begin alike, prefix cache on against off

All on `tandem serve` with models that are there (demo, or random weights of the 135M shape); about six minutes on two
cores. `--record` writes `bench/results/claims.json`. Exit code 1 if a claim does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import uvloop

from bench.peers.burst import Burst, burst_shape, measure_burst
from bench.peers.servers import DISAGGREGATED, TANDEM_SERVERS, Server, tandem_turns, warm_up
from bench.scaling import run as run_scaling
from bench.soak.calls import Kind, Said, draw_requests, learn, listen, wrong
from bench.support.checkpoints import PEER_SHAPES, write_checkpoint
from bench.support.cluster import becomes_idle, serve
from bench.support.machine import write_record
from bench.support.markdown import table
from bench.support.random_requests import MAX_PRIORITY
from bench.support.scrape import worker_counters
from bench.support.streams import TandemStreams, fresh_prompts
from tandem.client import AsyncClient, Client, GenerateOptions
from tandem.errors import TandemError
from tandem.types import Role

_READY_S = 120.0
_TIMEOUT_S = 180.0
_SAMPLE_S = 0.02
_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Claim:
    """One figure and the bound that it is held against."""

    name: str
    what: str
    found: float
    limit: float
    at_least: bool = True
    """Whether the figure must be at least the limit, or at most."""

    @property
    def holds(self) -> bool:
        """Whether the figure keeps the bound."""
        return self.found >= self.limit if self.at_least else self.found <= self.limit


class _PoolWatch:
    """Samples the decode workers' own accounting of their pool until the block ends."""

    def __init__(self, client: AsyncClient) -> None:
        self.waste: list[float] = []
        """Share of the slots in live blocks that hold no token."""
        self.most_live = 0
        self._client = client

    async def __aenter__(self) -> _PoolWatch:
        self._task = asyncio.create_task(self._sample())
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _sample(self) -> None:
        while True:
            for worker in (await self._client.status()).workers:
                pool = worker.load.pool
                if worker.info.role is Role.DECODE and pool.live:
                    self.waste.append(pool.unused_slots / (pool.live * pool.block_size))
                    self.most_live = max(self.most_live, pool.live)
            await asyncio.sleep(_SAMPLE_S)


async def _ask(client: AsyncClient, requests: Sequence[GenerateOptions], at_once: int | None = None) -> float:
    """Seconds until all requests have ended, `at_once` of them at a time. Raises TandemError if one fails."""
    slots = asyncio.Semaphore(at_once or len(requests))

    async def one(options: GenerateOptions) -> None:
        async with slots:
            await client.complete(timeout_s=_TIMEOUT_S, **options)

    began_s = time.monotonic()
    await asyncio.gather(*map(one, requests))
    return time.monotonic() - began_s


def _request(rng: random.Random, prompt_tokens: int, max_tokens: int, **more: object) -> GenerateOptions:
    prompt = [rng.randrange(4, 600) for _ in range(prompt_tokens)]
    options = {"token_ids": prompt, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **more}
    return cast(GenerateOptions, options)


async def batching(num_requests: int = 192, batch: int = 16) -> list[Claim]:
    """Exponential output lengths: each request enters as another ends, against batches that wait for their longest."""
    rng = random.Random(1)
    lengths = [min(640, 1 + int(rng.expovariate(1 / 128))) for _ in range(num_requests)]
    requests = [_request(rng, 256, length) for length in lengths]
    with serve("demo", "--no-prefix-cache", "--block-size", str(_BLOCK), "--max-seqs", str(batch)) as cluster:
        async with AsyncClient(cluster.target) as client:
            await client.wait_ready(timeout_s=_READY_S)
            await _ask(client, requests[:batch])
            async with _PoolWatch(client) as watch:
                continuous_s = await _ask(client, requests, batch)
            static_s = 0.0
            for first in range(0, num_requests, batch):
                static_s += await _ask(client, requests[first : first + batch])
    return [
        Claim("batching", "tokens/s, continuous by static batches of 16", static_s / continuous_s, 1.3),
        Claim("batching", "unused slots of live blocks, mean", statistics.fmean(watch.waste), 0.04, at_least=False),
    ]


async def sharing(n: int = 4, num_sequences: int = 32) -> list[Claim]:
    """Sampled choices and beams of one request, against as many single requests that share nothing."""
    prompt, output, claims = 640, 320, list[Claim]()
    single = [_request(random.Random(0), prompt, output, temperature=1.0, seed=seed) for seed in range(num_sequences)]
    pool = 8 * -(-(prompt + output) // _BLOCK)
    common = ("--no-prefix-cache", "--block-size", str(_BLOCK), "--max-seqs", str(num_sequences))
    with serve("demo", *common, "--kv-blocks", str(pool)) as cluster, Client(cluster.target) as status:
        async with AsyncClient(cluster.target) as client:
            await client.wait_ready(timeout_s=_READY_S)
            for kind in ("choices", "beams"):
                more = {"n": n, "beam_width": n} if kind == "beams" else {"n": n}
                groups = [cast(GenerateOptions, {**each, **more}) for each in single[::n]]
                most = []
                for requests in ([groups[0]], single[:n]):
                    await asyncio.to_thread(becomes_idle, status, 10)  # by a new report of every worker
                    async with _PoolWatch(client) as watch:
                        await _ask(client, requests)
                    most.append(watch.most_live)
                gain = await _ask(client, single) / await _ask(client, groups)
                claims += [
                    Claim("sharing", f"blocks of {n} {kind}, by those of {n} requests", most[0] / most[1], 0.75, False),
                    Claim("sharing", f"tokens/s of {n} {kind} in a full pool, by single requests", gain, 1.1),
                ]
    return claims


async def small_pool(seconds: float = 45.0, callers: int = 48) -> list[Claim]:
    """A pool of a quarter of the demand, over every sampling parameter, with a host tier."""
    common = ("--block-size", str(_BLOCK), "--max-priority", str(MAX_PRIORITY))
    with serve("demo", *common, "--no-prefix-cache") as cluster:
        async with AsyncClient(cluster.target) as client:
            await client.wait_ready(timeout_s=_READY_S)
            kinds = await learn(client, draw_requests(60, 0))
    needs = [_blocks_at_the_end(kind) for kind in kinds]
    blocks = max(round(callers * statistics.fmean(needs) / 4), 2 * max(needs))
    complaints: list[str] = []
    with serve("demo", *common, "--kv-blocks", str(blocks), "--host-cache-memory", "16MiB") as cluster:
        async with AsyncClient(cluster.target) as client:
            await client.wait_ready(timeout_s=_READY_S)
            end_s = time.monotonic() + seconds

            async def caller(rng: random.Random) -> None:
                while time.monotonic() < end_s:
                    complaints.extend(await _complaints(client, rng.choice(kinds)))

            async with _PoolWatch(client) as watch:
                await asyncio.gather(*(caller(random.Random(number)) for number in range(callers)))
            counted = await asyncio.to_thread(worker_counters, (await client.status()).admin_address)
        with Client(cluster.target) as status:
            is_idle = becomes_idle(status, 20)
    for each in complaints[:5]:
        print(f"small_pool: {each}", file=sys.stderr)
    preempted = sum(count for name, count in counted.items() if name.startswith("tandem_preemptions"))
    return [
        Claim("small_pool", "answers that are wrong or failed", len(complaints), 0, at_least=False),
        Claim("small_pool", "sequences that were preempted", preempted, 1),
        Claim("small_pool", "unused slots of live blocks, mean", statistics.fmean(watch.waste), 0.06, at_least=False),
        Claim("small_pool", "workers at rest afterwards", float(is_idle), 1),
    ]


def _blocks_at_the_end(kind: Kind) -> int:
    """With nothing shared; prompts of text count as 200 tokens."""
    prompt = len(kind.request.options.get("token_ids", ())) or 200
    seqs: int = max(len(kind.answer), kind.request.options.get("beam_width", 0))
    return seqs * -(-(prompt + max(len(said.token_ids) for said in kind.answer.values())) // _BLOCK)


async def _complaints(client: AsyncClient, kind: Kind) -> list[str]:
    heard: dict[int, Said] = {}
    try:
        await listen(client, kind.request, heard, _TIMEOUT_S, 0.0)
    except TandemError as error:
        return [f"{kind.request.name}: {error.reason}: {error.message}"]
    complaint = wrong(heard, kind.answers, succeeded=True)
    return [f"{kind.request.name}: {complaint}"] if complaint else []


async def scaling() -> list[Claim]:
    """Callers who check every token while workers come and go, and each process is replaced."""
    outcome = await asyncio.to_thread(run_scaling, 8, 96, 16, "auto")
    bad_exits = sum(each.code != 0 for each in outcome.exits)
    return [
        Claim("scaling", f"lost or wrong of {outcome.requests} requests", len(outcome.errors), 0, at_least=False),
        Claim("scaling", f"processes of {len(outcome.exits)} that left with a code", bad_exits, 0, at_least=False),
    ]


async def burst(rounds: int = 2) -> list[Claim]:
    """The longest gaps of running streams, with long prompts beside them by without."""
    shape, found = PEER_SHAPES["135m"], Burst()
    vocab_size = shape.sizes["vocab_size"]
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(shape, Path(folder))
        async with tandem_turns(Path(folder), Server(TANDEM_SERVERS[DISAGGREGATED])) as turn, turn() as client:
            await warm_up(client, vocab_size)
            for number in range(rounds):
                await measure_burst(client, burst_shape("135m"), vocab_size, number, found)
    ratio = found.document()["p99_ratio"]
    return [Claim("burst", "99th percentile of gaps, beside long prompts by quiet", ratio, 2.0, at_least=False)]


async def prefix(num_requests: int = 12, prompt_tokens: int = 1024) -> list[Claim]:
    """Prompts of which nine tenths are known, one after the other, with and without the cache."""
    shape, first_s = PEER_SHAPES["135m"], dict[str, float]()
    vocab_size = shape.sizes["vocab_size"]
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(shape, Path(folder))
        for option in ("--prefix-cache", "--no-prefix-cache"):
            rng = random.Random(0)
            (known,) = fresh_prompts(rng, 1, prompt_tokens * 9 // 10, vocab_size)
            with serve(folder, option, "--kv-memory", "1GiB") as cluster:
                async with AsyncClient(cluster.target) as client:
                    await client.wait_ready(timeout_s=_READY_S)
                    streams = TandemStreams(client)
                    await warm_up(streams, vocab_size)
                    took_s = []
                    for _ in range(num_requests + 1):
                        (own,) = fresh_prompts(rng, 1, prompt_tokens - len(known), vocab_size)
                        took_s.append((await streams.generate(known + own, 8)).ttft_s)
            first_s[option] = statistics.median(took_s[1:])
    ratio = first_s["--prefix-cache"] / first_s["--no-prefix-cache"]
    return [Claim("prefix", "first token, 90 % of the prompt known, cache on by off", ratio, 0.35, at_least=False)]


CLAIMS: dict[str, Callable[[], object]] = {
    each.__name__: each for each in (batching, sharing, small_pool, scaling, burst, prefix)
}


def main() -> int:
    """Takes the claims; 1 if one does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*CLAIMS, []], metavar="NAME", help="default: all")
    parser.add_argument("--record", action="store_true", help="of all claims: write bench/results/claims.json")
    args = parser.parse_args()
    if args.record and args.names:
        parser.error("--record is for all claims")
    claims: list[Claim] = []
    for name in args.names or CLAIMS:
        print(f"{name} …", file=sys.stderr, flush=True)
        claims += uvloop.run(CLAIMS[name]())  # type: ignore[arg-type]
    print(as_markdown([{**asdict(each), "holds": each.holds} for each in claims]))
    if args.record:
        write_record("claims", {"claims": [{**asdict(each), "holds": each.holds} for each in claims]})
    return 0 if all(each.holds for each in claims) else 1


def as_markdown(claims: Sequence[dict[str, object]]) -> str:
    """A row per claim."""
    rows = [
        (
            *(f"{each['name']}", f"{each['what']}", f"{each['found']:.3g}"),
            f"{'≥' if each['at_least'] else '≤'} {each['limit']:g}",
            "yes" if each["holds"] else "**no**",
        )
        for each in claims
    ]
    return table(("claim", "figure", "found", "bound", "holds"), rows)


if __name__ == "__main__":
    sys.exit(main())
