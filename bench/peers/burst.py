"""What long prompts do to streams that are decoding.

Eight streams decode, first undisturbed, then while four 2048-token prompts arrive 0.3 s apart. The gaps between a
stream's messages are compared: all of the undisturbed run, against those that reach into the time from the first long
prompt's sending to the last one's first token.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.support.streams import OnFirst, Prompt, Stream, StreamClient, fresh_prompts
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
class Burst:
    """One server over all rounds; seconds."""

    quiet_gap_s: list[float] = field(default_factory=list)
    burst_gap_s: list[float] = field(default_factory=list)
    burst_ttft_s: list[float] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """Milliseconds, for the record."""
        quiet, burst = _percentiles(self.quiet_gap_s), _percentiles(self.burst_gap_s)
        ttft_s = sorted(self.burst_ttft_s)
        return {
            "quiet_ms": quiet,
            "burst_ms": burst,
            "p99_ratio": burst["p99"] / quiet["p99"],
            "ttft_ms": {"best": ttft_s[0] * 1e3, "median": quantile(ttft_s, 0.5) * 1e3, "max": ttft_s[-1] * 1e3},
        }


async def measure_burst(client: StreamClient, shape: BurstShape, vocab_size: int, seed: int, into: Burst) -> None:
    """Undisturbed streams, then streams with the burst; adds to `into`. Raises RuntimeError if they end too soon."""
    rng = random.Random(seed)
    begun = asyncio.Semaphore(0)

    async def streams(on_first: OnFirst | None = None) -> list[Stream]:
        prompts = fresh_prompts(rng, shape.streams, shape.prompt_tokens, vocab_size)
        return await asyncio.gather(*(client.generate(each, shape.output_tokens, on_first) for each in prompts))

    async def burst() -> list[Stream]:
        for _ in range(shape.streams):
            await begun.acquire()
        await asyncio.sleep(shape.burst_after_s)
        return await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(long)))

    async def one(number: int, prompt: Prompt) -> Stream:
        await asyncio.sleep(number * shape.burst_spacing_s)
        return await client.generate(prompt, shape.burst_output_tokens)

    into.quiet_gap_s += _steady_gaps(await streams())
    long = fresh_prompts(rng, shape.burst_prompts, shape.burst_prompt_tokens, vocab_size)
    decoding, prompts = await asyncio.gather(streams(begun.release), burst())
    start_s, end_s = prompts[0].sent_s, max(stream.sent_s + stream.ttft_s for stream in prompts)
    gaps_s = [gap for stream in decoding for gap in stream.gaps_s(start_s, end_s)]
    if not gaps_s:
        raise RuntimeError(f"streams of {shape.output_tokens} tokens ended before the long prompts came")
    into.burst_gap_s += gaps_s
    into.burst_ttft_s += [stream.ttft_s for stream in prompts]


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
    ordered = sorted(gaps_s)
    return {"p50": quantile(ordered, 0.5) * 1e3, "p99": quantile(ordered, 0.99) * 1e3, "max": ordered[-1] * 1e3}
