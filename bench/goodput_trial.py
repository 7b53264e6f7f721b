"""One trial of `bench.goodput`: requests sent at their times, whatever became of the others, and what callers met.

A trial of `count` requests at a rate is a Poisson process under the condition that so many arrive in `count / rate`
seconds: arrival times are independent and uniform there. Lengths are log-normal and stratified: of `count` requests one
falls into each of the `count` equally probable parts of the distribution, in random order. So the load that is offered
is the load that is named, with few requests too; all rates and all servers meet the same requests in the same order.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from statistics import NormalDist
from typing import Any

from bench.peers.process import PeerError
from bench.support.streams import MissingTokens, Prompt, StreamClient, fresh_prompts
from simulator.outcomes import quantile
from tandem.errors import TandemError


@dataclass(frozen=True, slots=True)
class Lengths:
    """A log-normal distribution of tokens, cut to `least` … `most`."""

    median: int
    sigma: float
    """Standard deviation of the logarithm."""
    least: int
    most: int

    def at(self, share: float) -> int:
        """Its quantile, 0 < share < 1."""
        tokens = self.median * math.exp(self.sigma * NormalDist().inv_cdf(share))
        return min(self.most, max(self.least, round(tokens)))


@dataclass(frozen=True, slots=True)
class Load:
    """What callers ask for."""

    name: str
    prompt: Lengths
    output: Lengths


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: when it is sent, and how many tokens go in and come out."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


LOADS: Mapping[str, Load] = {
    load.name: load
    for load in (
        Load("mixed", Lengths(300, 0.8, 16, 2048), Lengths(60, 0.6, 8, 256)),
        Load("prompt-heavy", Lengths(800, 0.5, 64, 2048), Lengths(16, 0.5, 4, 64)),
        Load("decode-heavy", Lengths(64, 0.6, 16, 512), Lengths(160, 0.4, 32, 512)),
    )
}
"""By name: conversations; extraction and classification of documents; writing from short orders."""


def arrivals(load: Load, rate_per_s: float, count: int, seed: int) -> tuple[Arrival, ...]:
    """`count` requests at `rate_per_s` on average, in order of arrival."""
    rng = Random(seed)
    span_s = count / rate_per_s
    shares = sorted(rng.random() for _ in range(count))
    prompts = _stratified(load.prompt, count, rng)
    outputs = _stratified(load.output, count, rng)
    return tuple(
        Arrival(share * span_s, prompt, output) for share, prompt, output in zip(shares, prompts, outputs, strict=True)
    )


def _stratified(lengths: Lengths, count: int, rng: Random) -> list[int]:
    """One of each of `count` equally probable parts, in random order."""
    drawn = [lengths.at((part + _open(rng)) / count) for part in range(count)]
    rng.shuffle(drawn)
    return drawn


def _open(rng: Random) -> float:
    """Uniform, neither 0 nor 1: the quantiles there are infinite."""
    return rng.uniform(1e-6, 1 - 1e-6)


ATTAINMENT = 0.9
"""Share of the requests that must meet both objectives."""
ITL_QUANTILE = 0.95
TTFT_FACTOR, ITL_FACTOR = 8.0, 3.0
"""Objectives, times the best server's unloaded figures."""
UNLOADED_LENGTHS_SEED = 1_000_000
"""Of the requests one at a time: all servers get the same lengths, or figures of few requests cannot be compared."""


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a caller is to be given."""

    ttft_s: float
    """From the time at which the request is due."""
    itl_s: float
    """On the 95th percentile of a request's own gaps between messages."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one caller met."""

    ttft_s: float
    itl_s: float
    """The 95th percentile of its gaps; 0 if it had none."""
    failed: bool = False

    @classmethod
    def of(cls, due_s: float, arrivals_s: Sequence[float]) -> Outcome:
        """From when each message with tokens came; at least one did."""
        gaps_s = sorted(later - earlier for earlier, later in pairwise(arrivals_s))
        return cls(arrivals_s[0] - due_s, quantile(gaps_s, ITL_QUANTILE) if gaps_s else 0.0)

    def misses_first(self, objectives: Objectives) -> bool:
        """Whether its first token came late, or never."""
        return self.failed or self.ttft_s > objectives.ttft_s

    def misses_between(self, objectives: Objectives) -> bool:
        """Whether it waited too long between tokens."""
        return self.failed or self.itl_s > objectives.itl_s

    def attains(self, objectives: Objectives) -> bool:
        """Whether it met both."""
        return not self.misses_first(objectives) and not self.misses_between(objectives)


FAILED = Outcome(math.inf, math.inf, failed=True)


@dataclass(frozen=True, slots=True)
class Trial:
    """A load at a rate on one server."""

    rate_per_s: float
    seed: int
    """Of the arrivals: servers with the same seed met the same requests at the same times."""
    objectives: Objectives
    outcomes: tuple[Outcome, ...]
    client_cpu_share: float
    """Of one core: this process's time."""
    seconds: float

    @property
    def attained(self) -> int:
        """Requests that met both objectives."""
        return sum(each.attains(self.objectives) for each in self.outcomes)

    def document(self) -> dict[str, Any]:
        """For the record."""
        good = [each for each in self.outcomes if not each.failed]
        return {
            "rate_per_s": self.rate_per_s,
            "seed": self.seed,
            "requests": len(self.outcomes),
            "ended": len(self.outcomes),
            "attainment": self.attained / len(self.outcomes),
            "missed_first": sum(each.misses_first(self.objectives) for each in self.outcomes),
            "missed_between": sum(each.misses_between(self.objectives) for each in self.outcomes),
            "failed": len(self.outcomes) - len(good),
            "ttft_ms": _quantiles_ms([each.ttft_s for each in good]),
            "itl_ms": _quantiles_ms([each.itl_s for each in good]),
            "client_cpu_share": self.client_cpu_share,
            "seconds": self.seconds,
        }


def passes(trials: Sequence[Trial]) -> bool:
    """Whether enough of all requests of these trials met both objectives."""
    return sum(each.attained for each in trials) >= ATTAINMENT * sum(len(each.outcomes) for each in trials)


@dataclass(slots=True)
class Unloaded:
    """One server, one request at a time."""

    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    """The 95th percentile of each request's gaps."""
    gap_s: list[float] = field(default_factory=list)
    """All gaps."""

    def document(self) -> dict[str, float]:
        """Medians, for the record."""
        found = {"ttft_ms": self.ttft_s, "itl_ms": self.itl_s, "gap_ms": self.gap_s}
        return {name: statistics.median(values) * 1e3 for name, values in found.items()}


def objectives_of(unloaded: Sequence[Unloaded]) -> Objectives:
    """By the best server."""
    return Objectives(
        TTFT_FACTOR * min(statistics.median(each.ttft_s) for each in unloaded),
        ITL_FACTOR * min(statistics.median(each.itl_s) for each in unloaded),
    )


async def measure_unloaded(client: StreamClient, load: Load, count: int, vocab_size: int, seed: int) -> Unloaded:
    """`count` of the load's own requests, one after the other. `seed` makes the prompts' tokens."""
    requests = arrivals(load, 1.0, count, UNLOADED_LENGTHS_SEED)
    found = Unloaded()
    for request, prompt in zip(requests, _prompts(requests, vocab_size, seed), strict=True):
        stream = await client.generate(prompt, request.output_tokens)
        outcome = Outcome.of(stream.sent_s, [at_s for at_s, _ in stream.arrivals])
        found.gap_s += stream.gaps_s()
        found.ttft_s.append(outcome.ttft_s)
        found.itl_s.append(outcome.itl_s)
    return found


async def run_trial(
    client: StreamClient,
    requests: Sequence[Arrival],
    rate_per_s: float,
    arrivals_seed: int,
    objectives: Objectives,
    vocab_size: int,
    seed: int,
) -> Trial:
    """Sends `requests`. Raises what the client raises if no request ends well.

    `seed` makes the prompts' tokens: another one for each trial, or a prefix cache knows them.
    """
    errors: list[Exception] = []

    async def one(prompt: Prompt, request: Arrival) -> Outcome:
        due_s = began_s + request.at_s
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        try:
            stream = await client.generate(prompt, request.output_tokens)
        except (MissingTokens, PeerError, TandemError) as error:
            errors.append(error)
            return FAILED
        return Outcome.of(due_s, [at_s for at_s, _ in stream.arrivals])

    prompts = _prompts(requests, vocab_size, seed)
    began_s, cpu_s = time.perf_counter(), time.process_time()
    outcomes = await asyncio.gather(*map(one, prompts, requests))
    seconds = time.perf_counter() - began_s
    if len(errors) == len(outcomes):
        raise errors[0]
    share = (time.process_time() - cpu_s) / seconds
    return Trial(rate_per_s, arrivals_seed, objectives, tuple(outcomes), share, seconds)


def _prompts(requests: Sequence[Arrival], vocab_size: int, seed: int) -> list[Prompt]:
    rng = random.Random(seed)
    return [fresh_prompts(rng, 1, request.prompt_tokens, vocab_size)[0] for request in requests]


def _quantiles_ms(values_s: Sequence[float]) -> dict[str, float] | None:
    if not values_s:
        return None
    return {f"p{share:g}": quantile(sorted(values_s), share / 100) * 1e3 for share in (50, 90)}
