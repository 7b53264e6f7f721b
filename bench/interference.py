"""What long prompts do to streams that are decoding: `python -m bench.interference`.

Eight streams decode, first undisturbed, then while four 2048-token prompts arrive 0.3 s apart. The
gaps between a stream's messages are compared: all of the undisturbed run, against those that reach
into the time from the first long prompt's sending to the last one's first token. Tandem runs
disaggregated on the same cores as vLLM's server; the two take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from bench.peers.process import end_in_order
from bench.peers.served import (
    DISAGGREGATED,
    TANDEM_SERVERS,
    Turn,
    open_servers,
    take_turns,
)
from bench.peers.streams import Prompt, Stream, StreamClient, fresh_prompts
from bench.support.checkpoints import PEER_SHAPES, write_checkpoint
from shell.cores import usable_cores
from simulator.outcomes import quantile

_SMOKE_TOKENS = 1500


@dataclass(frozen=True, slots=True)
class BurstShape:
    """The work of one turn."""

    streams: int = 8
    prompt_tokens: int = 128
    output_tokens: int = 200
    burst_prompts: int = 4
    burst_prompt_tokens: int = 2048
    burst_output_tokens: int = 8
    burst_spacing_s: float = 0.3
    burst_after_s: float = 0.2
    """From the last stream's first token to the first long prompt."""


def burst_shape(model_shape: str) -> BurstShape:
    """For one of the peer shapes: the smoke shape's streams would otherwise end before the long prompts come."""
    return BurstShape(output_tokens=_SMOKE_TOKENS) if model_shape == "smoke" else BurstShape()


@dataclass(slots=True)
class Interference:
    """One server over all rounds; seconds."""

    quiet_gap_s: list[float] = field(default_factory=list)
    burst_gap_s: list[float] = field(default_factory=list)
    burst_ttft_s: list[float] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """Milliseconds, for the record."""
        quiet, burst = _percentiles(self.quiet_gap_s), _percentiles(self.burst_gap_s)
        return {
            "quiet_ms": quiet,
            "burst_ms": burst,
            "p99_ratio": burst["p99"] / quiet["p99"],
            "ttft_ms": {
                "best": min(self.burst_ttft_s) * 1e3,
                "median": quantile(sorted(self.burst_ttft_s), 0.5) * 1e3,
                "max": max(self.burst_ttft_s) * 1e3,
            },
        }


Results = dict[str, Interference]
"""By server."""


class _Started:
    """Counts streams until all have had their first token."""

    def __init__(self, count: int) -> None:
        self._left = count
        self.all_started = asyncio.Event()

    def one_started(self) -> None:
        self._left -= 1
        if not self._left:
            self.all_started.set()


async def measure_turn(client: StreamClient, shape: BurstShape, vocab_size: int, seed: int, into: Interference) -> None:
    """Undisturbed streams, then streams with the burst; adds to `into`."""
    rng = random.Random(seed)
    quiet = await _streams(client, shape, fresh_prompts(rng, shape.streams, shape.prompt_tokens, vocab_size))
    into.quiet_gap_s += _steady_gaps(quiet)
    decoding = fresh_prompts(rng, shape.streams, shape.prompt_tokens, vocab_size)
    long = fresh_prompts(rng, shape.burst_prompts, shape.burst_prompt_tokens, vocab_size)
    started = _Started(shape.streams)
    streams, burst = await asyncio.gather(
        _streams(client, shape, decoding, started), _burst(client, shape, long, started)
    )
    start_s, end_s = burst[0].sent_s, max(stream.sent_s + stream.ttft_s for stream in burst)
    gaps_s = [gap for stream in streams for gap in stream.gaps_s(start_s, end_s)]
    if not gaps_s:
        raise RuntimeError(f"streams of {shape.output_tokens} tokens ended before the long prompts came")
    into.burst_gap_s += gaps_s
    into.burst_ttft_s += [stream.ttft_s for stream in burst]


async def _streams(
    client: StreamClient, shape: BurstShape, prompts: Sequence[Prompt], started: _Started | None = None
) -> list[Stream]:
    first = None if started is None else started.one_started
    return await asyncio.gather(*(client.generate(prompt, shape.output_tokens, first) for prompt in prompts))


async def _burst(client: StreamClient, shape: BurstShape, prompts: Sequence[Prompt], started: _Started) -> list[Stream]:
    await started.all_started.wait()
    await asyncio.sleep(shape.burst_after_s)

    async def one(number: int, prompt: Prompt) -> Stream:
        await asyncio.sleep(number * shape.burst_spacing_s)
        return await client.generate(prompt, shape.burst_output_tokens)

    return await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))


async def measure(turns: Mapping[str, Turn], shape: BurstShape, vocab_size: int, rounds: int) -> Results:
    """By server. Raises what a client raises, and RuntimeError if no stream lasts until the burst."""
    results: Results = {}

    async def one(name: str, client: StreamClient, number: int) -> None:
        await measure_turn(client, shape, vocab_size, number + 1, results.setdefault(name, Interference()))

    await take_turns(turns, rounds, one, vocab_size)
    return results


def _steady_gaps(streams: Sequence[Stream]) -> list[float]:
    """Gaps while all streams run: their own prompts are no part of the quiet."""
    start_s = max(stream.sent_s + stream.ttft_s for stream in streams)
    end_s = min(stream.end_s for stream in streams)
    return [
        now - before
        for stream in streams
        for (before, _), (now, _) in zip(stream.arrivals, stream.arrivals[1:], strict=False)
        if start_s <= before and now <= end_s
    ]


def _percentiles(gaps_s: Sequence[float]) -> dict[str, float]:
    return {
        "p50": quantile(sorted(gaps_s), 0.5) * 1e3,
        "p99": quantile(sorted(gaps_s), 0.99) * 1e3,
        "max": max(gaps_s) * 1e3,
    }


async def _main(args: argparse.Namespace) -> Results:
    shape, cores = PEER_SHAPES[args.shape], usable_cores()
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(shape, Path(folder))
        tandem = {DISAGGREGATED: TANDEM_SERVERS[DISAGGREGATED]}
        async with open_servers(Path(folder), tandem, cores, args.vllm_python) as turns:
            burst = BurstShape(output_tokens=args.output_tokens)
            return await measure(turns, burst, shape.sizes["vocab_size"], args.rounds)


def main() -> int:
    """Prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(PEER_SHAPES), default="135m")
    parser.add_argument("--vllm-python", type=Path, help="python of vLLM's environment; see `bench.peers`")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output-tokens", type=int, default=BurstShape().output_tokens, help="of each stream")
    args = parser.parse_args()
    end_in_order()
    results = uvloop.run(_main(args))
    print(json.dumps({name: result.document() for name, result in results.items()}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
