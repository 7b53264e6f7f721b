"""The HTTP face beside gRPC: `python -m bench.http_face [--rounds 8] [--record]`.

One cluster of the demo model, a prefill and a decode worker. In each round, in turns that change their order:

    32 streams by gRPC, then 32 by HTTP                     tokens per second of each, and their ratio
    16 streams by gRPC beside 16 more by gRPC, or by HTTP   99th percentile of the first 16 streams' gaps

Both clients share the cores with the servers: the ratio is of client and server together.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys

import uvloop

from bench.support.cluster import serve
from bench.support.http_streams import HttpStreams
from bench.support.machine import write_record
from bench.support.markdown import table
from bench.support.pairs import paired_ratio
from bench.support.ports import free_ports
from bench.support.streams import Stream, StreamClient, TandemStreams, fresh_prompts, tokens_per_s
from tandem.client import AsyncClient

_STREAMS = 32
_PROMPT_TOKENS, _MAX_TOKENS = 64, 256
_VOCAB_SIZE = 600
_READY_S = 60.0
RATE_HTTP, RATE_GRPC = "tokens/s, 32 streams by HTTP", "tokens/s, 32 streams by gRPC"
P99_HTTP, P99_GRPC = "p99 gap of 16 gRPC streams beside 16 by HTTP, ms", "p99 gap beside 16 more by gRPC, ms"


async def measure(rounds: int) -> dict[str, list[float]]:
    """Returns the figures of every round, by name."""
    figures: dict[str, list[float]] = {name: [] for name in (RATE_GRPC, RATE_HTTP, P99_GRPC, P99_HTTP)}
    rng = random.Random(1)
    (port,) = free_ports(1)
    with serve("demo", "--http", f"127.0.0.1:{port}") as cluster:
        async with AsyncClient(cluster.target) as client:
            await client.wait_ready(timeout_s=_READY_S)
            grpc, http = TandemStreams(client), HttpStreams(port, "demo")
            for each in (grpc, http):
                await _run([each] * _STREAMS, rng)
            for index in range(rounds):
                turns = ((RATE_GRPC, grpc), (RATE_HTTP, http))
                for name, server in turns if index % 2 else turns[::-1]:
                    figures[name].append(tokens_per_s(await _run([server] * _STREAMS, rng)))
                half = _STREAMS // 2
                others = ((P99_GRPC, grpc), (P99_HTTP, http))
                for name, server in others if index % 2 else others[::-1]:
                    streams = await _run([grpc] * half + [server] * half, rng)
                    figures[name].append(_p99([gap for each in streams[:half] for gap in each.gaps_s()]) * 1e3)
                print(f"round {index + 1} of {rounds}", file=sys.stderr, flush=True)
    return figures


async def _run(servers: list[StreamClient], rng: random.Random) -> list[Stream]:
    prompts = fresh_prompts(rng, len(servers), _PROMPT_TOKENS, _VOCAB_SIZE)
    streams = (server.generate(prompt, _MAX_TOKENS) for server, prompt in zip(servers, prompts, strict=True))
    return await asyncio.gather(*streams)


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def as_markdown(figures: dict[str, list[float]]) -> str:
    """Returns a table: medians, and the ratio of the pairs with its 95 % interval."""
    rows = []
    for grpc, http in ((RATE_GRPC, RATE_HTTP), (P99_GRPC, P99_HTTP)):
        ratio = paired_ratio(figures[grpc], figures[http])
        medians = (f"{statistics.median(figures[name]):.4g}" for name in (grpc, http))
        rows.append((http, *medians, str(ratio)))
    return table(("figure", "gRPC", "HTTP", "HTTP / gRPC, 95 % interval"), rows)


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.http_face", description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--record", action="store_true", help="write bench/results/http-face.json")
    args = parser.parse_args()
    figures = uvloop.run(measure(args.rounds))
    print(as_markdown(figures))
    if args.record:
        write_record("http-face", {"figures": figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
