"""What a prefix cache saves: `python -m bench.prefix_cache [--vllm-python PATH]`.

Three loads of which the prompts begin alike (`bench.prefix_loads`), at 50 and 90 % reuse, by a few callers at a time,
on `tandem serve` with its caches on and off, disaggregated and colocated, and on vLLM's server with its cache on (how
it is installed: `python -m bench.peers --help`). All servers are up at once and take turns at each load; in each
round the prompts are new ones. The same checkpoint with random weights for all, greedy, end-of-text ignored.

    hit rate      share of the prompts' tokens that the server says it found in a cache
    first token   from sending to the first token, of all rounds together
    tokens/s      generated, median of the rounds
    handed over   KV from prefill to decode worker, per request

The requests that fill the cache do not count, neither with the cache on nor off. `--record` writes
`bench/results/prefix-cache.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from bench.peers.bars import Bar
from bench.peers.process import end_in_order
from bench.peers.served import TANDEM_SERVERS, VLLM_SERVER, Turn, take_turns, tandem_turns, vllm_turns
from bench.peers.streams import Stream, StreamClient, tokens_per_s
from bench.prefix_loads import LOADS, LoadShape, Talk, talks
from bench.prefix_page import section
from bench.record import write_record
from bench.support.checkpoints import PEER_SHAPES, write_checkpoint
from shell.cores import usable_cores
from simulator.outcomes import quantile

REUSE = (0.5, 0.9)
FIRST_TOKEN_BAR = 0.25
"""Of the time to the first token without a cache, at the highest reuse."""
PEER_BAR = 1.0
"""Of vLLM's tokens/s."""
BLOCK_SIZE = 16
_OPTIONS = {"on": "--prefix-cache", "off": "--no-prefix-cache"}
_CACHED = {f"{name}, {state}": (name, state) for name in TANDEM_SERVERS for state in _OPTIONS}
"""Servers of Tandem by their names in the tables."""

Document = dict[str, Any]


@dataclass(slots=True)
class Measured:
    """One server under one load, over all rounds."""

    prompt_tokens: int = 0
    streams: list[Stream] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    """By round."""

    def document(self) -> Document:
        """For the record."""
        first_s = [each.ttft_s for each in self.streams]
        return {
            "requests": len(self.streams),
            "hit_rate": sum(each.cached_tokens for each in self.streams) / self.prompt_tokens,
            "first_token_p50_ms": quantile(sorted(first_s), 0.5) * 1e3,
            "first_token_p99_ms": quantile(sorted(first_s), 0.99) * 1e3,
            "tokens_per_s": statistics.median(self.tokens_per_s),
            "transfer_bytes": sum(each.transfer_bytes for each in self.streams) / len(self.streams),
        }


async def run_load(
    client: StreamClient, planned: Sequence[Talk], output_tokens: int, callers: int, into: Measured
) -> None:
    """Asks every opening once, then all else with so many callers, which counts; adds to `into`."""
    answers = {}
    for opening in dict.fromkeys(talk.opening for talk in planned):
        answers[opening] = (await client.generate(opening, output_tokens)).token_ids
    left, streams = deque(planned), list[Stream]()

    async def caller() -> None:
        while left:
            talk = left.popleft()
            known = talk.opening + (answers[talk.opening] if talk.is_chat else ())
            for addition in talk.additions:
                prompt = known + addition
                stream = await client.generate(prompt, output_tokens)
                known = prompt + stream.token_ids
                streams.append(stream)
                into.prompt_tokens += len(prompt)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(callers):
            tasks.create_task(caller())
    into.streams += streams
    into.tokens_per_s.append(tokens_per_s(streams))


@contextlib.asynccontextmanager
async def _servers(
    model: Path, shape: LoadShape, cores: Sequence[int], vllm_python: Path | None
) -> AsyncIterator[dict[str, Turn]]:
    """By name. Each pool of Tandem's holds all prompts of a load twice, even if nothing of them is shared."""
    blocks = str(2 * (shape.num_tokens // BLOCK_SIZE + shape.requests))
    async with contextlib.AsyncExitStack() as stack:
        turns: dict[str, Turn] = {}
        if vllm_python is not None:  # first: the others' heartbeats do not disturb its compiler
            turns[VLLM_SERVER] = await stack.enter_async_context(vllm_turns(model, cores, vllm_python))
        for title, (name, state) in _CACHED.items():
            options = (_OPTIONS[state], "--block-size", str(BLOCK_SIZE), "--kv-blocks", blocks)
            turns[title] = await stack.enter_async_context(tandem_turns(model, (*TANDEM_SERVERS[name], *options)))
        yield turns


async def measure(turns: Mapping[str, Turn], shape: LoadShape, vocab_size: int, rounds: int, callers: int) -> Document:
    """Documents by load, reuse in percent, server. Raises what a client raises."""
    measured = {load: {f"{reuse:.0%}": {name: Measured() for name in turns} for reuse in REUSE} for load in LOADS}

    works = [(load, reuse) for load in LOADS for reuse in REUSE]

    async def one(name: str, client: StreamClient, number: int) -> None:
        load, reuse = works[number % len(works)]
        print(f"{load}, {reuse:.0%}: {name} …", file=sys.stderr, flush=True)
        planned = talks(load, shape, reuse, vocab_size, seed=number)
        await run_load(client, planned, shape.output_tokens, callers, measured[load][f"{reuse:.0%}"][name])

    await take_turns(turns, rounds * len(works), one, vocab_size)
    return {
        load: {reuse: {name: each.document() for name, each in servers.items()} for reuse, servers in by_reuse.items()}
        for load, by_reuse in measured.items()
    }


def bars(loads: Document) -> list[Document]:
    """The first token with the cache on against off at the highest reuse, and tokens/s against vLLM's at every one."""
    found = []
    for load, by_reuse in loads.items():
        servers = by_reuse[f"{max(REUSE):.0%}"]
        for name in TANDEM_SERVERS:
            on, off = (servers[f"{name}, {state}"]["first_token_p50_ms"] for state in _OPTIONS)
            found.append(
                Bar(f"{load}, {max(REUSE):.0%}: first token, {name}, on / off", FIRST_TOKEN_BAR, True, on / off, None)
            )
        for reuse, servers in by_reuse.items():
            if VLLM_SERVER in servers:
                ours = max(servers[f"{name}, on"]["tokens_per_s"] for name in TANDEM_SERVERS)
                ratio = ours / servers[VLLM_SERVER]["tokens_per_s"]
                found.append(Bar(f"{load}, {reuse}: tokens/s, better of both / vLLM", PEER_BAR, False, ratio, None))
    return [bar.document() for bar in found]


async def _run(args: argparse.Namespace, model: Path, shape: LoadShape, cores: Sequence[int]) -> Document:
    vocab_size = PEER_SHAPES[args.shape].sizes["vocab_size"]
    async with _servers(model, shape, cores, args.vllm_python) as turns:
        loads = await measure(turns, shape, vocab_size, args.rounds, args.callers)
    return {
        "model": args.shape,
        "threads": len(cores),
        "rounds": args.rounds,
        "callers": args.callers,
        "shape": asdict(shape),
        "loads": loads,
        "bars": bars(loads),
    }


def main() -> int:
    """Prints, and records if told to; exit code 1 if a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", type=Path, help="python of vLLM's environment, as `make peers-venv` makes it")
    parser.add_argument("--shape", choices=sorted(PEER_SHAPES), default="135m")
    parser.add_argument("--threads", type=int, default=2, help="cores that all servers share")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--requests", type=int, default=12, help="of a load in one round")
    parser.add_argument("--callers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--record", action="store_true", help="write bench/results/prefix-cache.json and the page")
    args = parser.parse_args()
    shape = LoadShape(args.requests, args.prompt_tokens, args.output_tokens)
    try:
        talks("multi-turn", shape, min(REUSE), PEER_SHAPES[args.shape].sizes["vocab_size"], 0)
    except ValueError as error:
        parser.error(str(error))
    end_in_order()
    cores = usable_cores()[: args.threads]
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(PEER_SHAPES[args.shape], Path(folder))
        results = uvloop.run(_run(args, Path(folder), shape, cores))
    print("\n".join(section(results)))
    if args.record:
        write_record("prefix-cache", results)
    return 1 if any(bar["met"] is False for bar in results["bars"]) else 0


if __name__ == "__main__":
    sys.exit(main())
