"""The loads on which goodput is measured and simulated: lengths, and Poisson arrivals. Pure: same seed, same requests.

A trial of `count` requests at a rate is a Poisson process under the condition that so many arrive in `count / rate`
seconds: arrival times are independent and uniform there, in order. Lengths are log-normal and stratified: of `count`
requests one falls into each of the `count` equally probable parts of the distribution, in random order. So the load
that is offered is the load that is named, with few requests too; and since times scale with the rate and nothing else
depends on it, all rates and all servers meet the same requests in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from statistics import NormalDist


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
