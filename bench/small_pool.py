"""A pool a quarter of what its callers want, everything at once: `python -m bench.small_pool --minutes 10`.

Many callers ask, one request after the other each, for what shares and moves blocks: several choices, beams, grammars,
prompts that begin alike under two salts, and requests over every sampling parameter, of several priorities. Every
answer was learned in a quiet run on a large pool without a prefix cache. The demand is what the callers' requests would
hold on average at their ends, with nothing shared, times the callers; the pools of both workers have a quarter of it,
or as much as the largest request needs, if that is more. Evicted and preempted blocks go to a host tier.

A violation, exit code 1:

    wrong       an answer that is not that of the quiet run
    failed      a request that was refused or failed, or did not end in time
    unclean     a block that somebody holds at the end, when nobody asks for anything any more
    waste       token slots that hold nothing, as a share of the live blocks' slots, mean over the run:
                `WASTE_BAR` or more
    shows none  a run in which no sequence was preempted

`--record` writes `bench/results/small-pool.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import uvloop
from prometheus_client.parser import text_string_to_metric_families

from bench.record import write_record
from bench.soak_calls import Kind, Said, draw_requests, learn, listen, wrong
from bench.support.cluster import becomes_idle, serve
from bench.support.random_requests import MAX_PRIORITY, RandomRequest
from shell.clock import MonotonicClock
from tandem.client import AsyncClient, Client
from tandem.errors import TandemError
from tandem.types import Role

NUM_KINDS = 80
DEMAND_SHARE = 1 / 4
WASTE_BAR = 0.04
READY_TIMEOUT_S = 120.0
CALL_TIMEOUT_S = 180.0
_SAMPLE_S = 0.1
_HTTP_TIMEOUT_S = 5.0
_IDLE_WITHIN_S = 20.0
_PREFIX_TOKENS = 160
_SALTS = ("", "salt")
_GRAMMARS: tuple[dict[str, Any], ...] = (
    {"regex": "(They|We) (gave|showed) [a-z]{3,8} to (Mira|Tom)\\."},
    {"choice": ["red kites", "blue lamps", "green boats and hats"]},
    {"json_schema": '{"type": "object", "properties": {"name": {"enum": ["Mira", "Tom"]}}, "required": ["name"]}'},
)
_PROMPT = ("prompt", "token_ids", "messages", "max_tokens")
_DRAWN = (*_PROMPT, "temperature", "seed", "n", "priority")
_COUNTED = ("preemption", "cache", "tier")
"""Counters of workers whose names hold one of these are told."""


def draw(count: int, seed: int) -> list[RandomRequest]:
    """Four sorts in turn; a request's name begins with its sort."""
    rng = Random(seed)
    prefixes = [[rng.randrange(4, 600) for _ in range(_PREFIX_TOKENS)] for _ in range(2)]

    def alike(options: dict[str, Any]) -> dict[str, Any]:
        own = [rng.randrange(4, 600) for _ in range(rng.randint(1, 100))]
        prompt = {"token_ids": rng.choice(prefixes) + own, "cache_salt": rng.choice(_SALTS)}
        return _only(options, _DRAWN[len(_PROMPT) - 1 :]) | prompt

    def beams(options: dict[str, Any]) -> dict[str, Any]:
        width = rng.randint(2, 4)
        return _only(options, _PROMPT) | {"beam_width": width, "n": rng.randint(1, width)}

    def grammar(options: dict[str, Any]) -> dict[str, Any]:
        return _only(options, _DRAWN) | rng.choice(_GRAMMARS)

    makers: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "any": dict,
        "alike": alike,
        "beams": beams,
        "grammar": grammar,
    }
    sorts = [list(makers)[index % len(makers)] for index in range(count)]
    return [
        replace(request, name=f"{sort}-{index:03}", options=makers[sort](request.options))
        for index, (sort, request) in enumerate(zip(sorts, draw_requests(count, seed), strict=True))
    ]


def _only(options: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: options[name] for name in names if name in options}


def blocks_of(kind: Kind, num_prompt_tokens: int, block_size: int) -> int:
    """What it holds at its end, with nothing shared; each beam as the longest of the choices."""
    lengths = [len(said.token_ids) for said in kind.answer.values()]
    lengths += [max(lengths)] * (kind.request.options.get("beam_width", 0) - len(lengths))
    return sum(-(-(num_prompt_tokens + length) // block_size) for length in lengths)


def largest_need(kind: Kind, num_prompt_tokens: int, block_size: int) -> int:
    """Blocks without which a worker refuses it: the prompt once, all that each sequence may write besides."""
    options = kind.request.options
    num_seqs: int = options.get("beam_width", options.get("n", 1))
    max_tokens: int = options["max_tokens"]
    return -(-num_prompt_tokens // block_size) + num_seqs * (2 + max_tokens // block_size)


@dataclass(slots=True)
class Account:
    """What one run came to; `violations` in words."""

    demand_blocks: float
    pool_blocks: int
    seconds: float = 0.0
    served: Counter[str] = field(default_factory=Counter)
    """Requests by sort."""
    sequences: int = 0
    """Choices and beams of them."""
    waste: list[float] = field(default_factory=list)
    """Samples of decode workers."""
    counters: Counter[str] = field(default_factory=Counter)
    """Of workers, at the end."""
    violations: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """For the record."""
        return {
            "demand_blocks": self.demand_blocks,
            "pool_blocks": self.pool_blocks,
            "seconds": self.seconds,
            "served": dict(self.served),
            "sequences": self.sequences,
            "waste_bar": WASTE_BAR,
            "waste_mean": statistics.fmean(self.waste or [0.0]),
            "waste_max": max(self.waste, default=0.0),
            "counters": dict(self.counters),
            "violations": self.violations,
        }

    def judge(self) -> None:
        """Adds what the run as a whole violates."""
        mean = statistics.fmean(self.waste or [1.0])
        if mean >= WASTE_BAR:
            self.violations.append(f"waste: {mean:.1%} of the slots in use hold no token")
        if not any(count for name, count in self.counters.items() if "preemption" in name):
            self.violations.append("shows none: no sequence was preempted")


async def plan(
    target: str, callers: int, block_size: int, requests: Sequence[RandomRequest]
) -> tuple[list[Kind], Account]:
    """The right answers, and how large the small pool is to be."""
    async with AsyncClient(target) as client:
        await client.wait_ready(READY_TIMEOUT_S)
        kinds = await learn(client, requests)
        lengths = [await _num_prompt_tokens(client, kind.request) for kind in kinds]
    sizes = list(zip(kinds, lengths, strict=True))
    demand = callers * statistics.fmean(blocks_of(*each, block_size) for each in sizes)
    return kinds, Account(
        demand, max(round(demand * DEMAND_SHARE), *(largest_need(*each, block_size) for each in sizes))
    )


async def _num_prompt_tokens(client: AsyncClient, request: RandomRequest) -> int:
    if "token_ids" in request.options:
        return len(request.options["token_ids"])
    found = await client.tokenize(request.options.get("prompt"), messages=request.options.get("messages"))
    return len(found.token_ids)


async def squeeze(target: str, kinds: Sequence[Kind], account: Account, callers: int, seconds: float) -> None:
    """Callers ask until the time is up, and then for the rest of what is under way."""
    clock = MonotonicClock()
    begin_s = clock.now_s()
    async with AsyncClient(target) as client:
        await client.wait_ready(READY_TIMEOUT_S)

        async def caller(rng: Random) -> None:
            while clock.now_s() - begin_s < seconds:
                await _ask(client, rng.choice(kinds), account)

        sampling = asyncio.create_task(_sample(client, account.waste))
        async with asyncio.TaskGroup() as tasks:
            for number in range(callers):
                tasks.create_task(caller(Random(number)))
        sampling.cancel()
        account.counters += await asyncio.to_thread(_counters, (await client.status()).admin_address)
    account.seconds = clock.now_s() - begin_s


async def _ask(client: AsyncClient, kind: Kind, account: Account) -> None:
    heard: dict[int, Said] = {}
    try:
        await listen(client, kind.request, heard, CALL_TIMEOUT_S, 0.0)
    except TandemError as error:
        account.violations.append(f"failed: {kind.request.name}: {error.reason}: {error.message}")
        return
    complaint = wrong(heard, kind.answers, succeeded=True)
    if complaint:
        account.violations.append(f"wrong: {kind.request.name}: {complaint}")
    account.served[kind.request.name.partition("-")[0]] += 1
    account.sequences += kind.request.options.get("beam_width", len(kind.answer))


async def _sample(client: AsyncClient, waste: list[float]) -> None:
    """Again and again until cancelled."""
    while True:
        with suppress(TandemError):  # the router is busy: the next one counts
            for worker in (await client.status()).workers:
                pool = worker.load.pool
                if worker.info.role is Role.DECODE and pool.live:
                    waste.append(pool.unused_slots / (pool.live * pool.block_size))
        await asyncio.sleep(_SAMPLE_S)


def _counters(admin_address: str) -> Counter[str]:
    """Sums over all processes that the router tells Prometheus of, the router left out."""
    found: Counter[str] = Counter()
    for target in json.loads(_fetch(f"http://{admin_address}/targets")):
        if target["labels"]["role"] == "router":
            continue
        for family in text_string_to_metric_families(_fetch(f"http://{target['targets'][0]}/metrics")):
            for sample in family.samples if family.type == "counter" else ():
                if sample.name.startswith("tandem_") and any(each in sample.name for each in _COUNTED):
                    labels = ",".join(value for name, value in sorted(sample.labels.items()))
                    found[f"{sample.name} {labels}".rstrip()] += int(sample.value)
    return found


def _fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=_HTTP_TIMEOUT_S) as answer:
        body: bytes = answer.read()
    return body.decode()


def run(args: argparse.Namespace) -> Account:
    """Quiet run, then the small pool."""
    common = ("--block-size", str(args.block_size), "--max-priority", str(MAX_PRIORITY))
    with serve("demo", *common, "--no-prefix-cache") as cluster:
        kinds, account = uvloop.run(plan(cluster.target, args.callers, args.block_size, draw(NUM_KINDS, args.seed)))
    print(f"demand {account.demand_blocks:.0f} blocks, pool {account.pool_blocks}", file=sys.stderr, flush=True)
    small = ("--kv-blocks", str(account.pool_blocks), "--host-cache-memory", args.host_cache_memory)
    with serve("demo", *common, *small) as cluster:
        uvloop.run(squeeze(cluster.target, kinds, account, args.callers, 60 * args.minutes))
        with Client(cluster.target) as client:
            if not becomes_idle(client, _IDLE_WITHIN_S):
                account.violations.append(f"unclean: {client.status()}")
    account.judge()
    return account


def main() -> int:
    """Prints, and records if told to; exit code 1 if anything was violated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=0.5)
    parser.add_argument("--callers", type=int, default=48)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0, help="of the requests")
    parser.add_argument("--host-cache-memory", default="16MiB", help="of each worker")
    parser.add_argument("--record", action="store_true", help="write bench/results/small-pool.json and the page")
    args = parser.parse_args()
    results = {"callers": args.callers, "block_size": args.block_size, **run(args).document()}
    print(json.dumps(results, indent=2))
    if args.record:
        write_record("small-pool", results)
    return 1 if results["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
