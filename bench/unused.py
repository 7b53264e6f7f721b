"""What a decode step pays for sharing that nobody uses: `python -m bench.unused`.

Two colocated servers on the same cores, one with its prefix cache and a host tier, one with neither. Both are up and
take turns, who begins changes from round to round; the prompts are new ones, so that nothing is ever found. A turn's
figure is the median time between two tokens of a stream, all streams together; a round's is the ratio of both turns.
Neighbours of the machine hit both turns of a round, so the median of the rounds' ratios is told, and between which
ratios it lies with 95 % confidence (by ranks; that needs six rounds). The bar is held against the median.
`--record` writes `bench/results/unused.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop

from bench.peers.process import end_in_order
from bench.peers.served import TANDEM_SERVERS, take_turns, tandem_turns
from bench.peers.streams import StreamClient, fresh_prompts
from bench.record import write_record
from bench.support.checkpoints import PEER_SHAPES, write_checkpoint
from shell.cores import usable_cores

BAR = 1.02
"""Of a step without."""
NUM_STREAMS = (1, 16)
PROMPT_TOKENS = 64
_SERVER = (*TANDEM_SERVERS["tandem colocated"], "--kv-blocks", "512")
SERVERS: Mapping[str, tuple[str, ...]] = {
    "on": (*_SERVER, "--prefix-cache", "--host-cache-memory", "256MiB"),
    "off": (*_SERVER, "--no-prefix-cache"),
}
_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Cost:
    """At one number of streams."""

    streams: int
    on_ms: float
    """Median of the rounds, as the next."""
    off_ms: float
    ratio: float
    """Median of the rounds' own ratios."""
    lowest: float | None
    highest: float | None
    """Where the median ratio lies with 95 % confidence; None = too few rounds."""


def cost_of(streams: int, on_s: Sequence[float], off_s: Sequence[float]) -> Cost:
    """From both turns of each round."""
    ratios = sorted(on / off for on, off in zip(on_s, off_s, strict=True))
    skipped = _ranks_outside(len(ratios))
    return Cost(
        streams,
        statistics.median(on_s) * 1e3,
        statistics.median(off_s) * 1e3,
        statistics.median(ratios),
        None if skipped is None else ratios[skipped],
        None if skipped is None else ratios[-1 - skipped],
    )


def _ranks_outside(count: int) -> int | None:
    """How many of the lowest and of the highest values may be left out of an interval that holds the median.

    The median lies outside of it as often as a fair coin falls so rarely on one side (sign test).
    """
    outside, skipped = 0.0, None
    for rank in range(count // 2):
        outside += 2 * math.comb(count, rank) / 2**count
        if outside > 1 - _CONFIDENCE:
            break
        skipped = rank
    return skipped


async def step_s(client: StreamClient, streams: int, output_tokens: int, vocab_size: int, rng: random.Random) -> float:
    """Median time between two tokens."""
    prompts = fresh_prompts(rng, streams, PROMPT_TOKENS, vocab_size)
    ended = await asyncio.gather(*(client.generate(prompt, output_tokens) for prompt in prompts))
    begin_s = max(stream.arrivals[0][0] for stream in ended)  # from then on all of them decode
    return statistics.median(gap for stream in ended for gap in stream.gaps_s(start_s=begin_s))


async def measure(model: Path, vocab_size: int, rounds: int, output_tokens: int) -> list[Cost]:
    """Each number of streams."""
    found: dict[int, dict[str, list[float]]] = {streams: {name: [] for name in SERVERS} for streams in NUM_STREAMS}
    rng = random.Random(rounds)

    async def one(name: str, client: StreamClient, number: int) -> None:
        for streams in NUM_STREAMS:
            found[streams][name].append(await step_s(client, streams, output_tokens, vocab_size, rng))

    async with contextlib.AsyncExitStack() as stack:
        turns = {
            name: await stack.enter_async_context(tandem_turns(model, options)) for name, options in SERVERS.items()
        }
        await take_turns(turns, rounds, one, vocab_size)
    return [cost_of(streams, times_s["on"], times_s["off"]) for streams, times_s in found.items()]


def main() -> int:
    """Prints, and records if told to; exit code 1 if the bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(PEER_SHAPES), default="135m")
    parser.add_argument("--threads", type=int, default=2, help="cores that both servers share")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--record", action="store_true", help="write bench/results/unused.json and the page")
    args = parser.parse_args()
    end_in_order()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, usable_cores()[: args.threads])
    shape = PEER_SHAPES[args.shape]
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(shape, Path(folder))
        costs = uvloop.run(measure(Path(folder), shape.sizes["vocab_size"], args.rounds, args.output_tokens))
    settings = {"model": shape.name, "rounds": args.rounds, "output_tokens": args.output_tokens}
    results: dict[str, Any] = {**settings, "bar": BAR, "costs": [asdict(cost) for cost in costs]}
    for cost in costs:
        surely = "" if cost.lowest is None else f" ({cost.lowest:.3f} to {cost.highest:.3f})"
        print(
            f"{cost.streams} streams: {cost.on_ms:.2f} ms against {cost.off_ms:.2f} ms, "
            f"ratio {cost.ratio:.3f}{surely}, bar {BAR:g}"
        )
    if args.record:
        write_record("unused", results)
    return 1 if any(cost.ratio > BAR for cost in costs) else 0


if __name__ == "__main__":
    sys.exit(main())
