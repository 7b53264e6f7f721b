"""What a load test sends and when. Pure: same options, same requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from tandem.types import TokenId


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """One load test. Exactly one of `rate_per_s` (open loop) and `concurrency` (closed loop) is set."""

    rate_per_s: float | None
    concurrency: int | None
    arrivals: Literal["poisson", "fixed"] = "poisson"
    num_requests: int = 100
    num_warmup: int = 2
    prompt_tokens: int = 128
    """Mean."""
    output_tokens: int = 64
    """Mean."""
    lengths: Literal["fixed", "exponential"] = "fixed"
    temperature: float = 1.0
    seed: int = 0
    slo_ttft_s: float | None = None
    slo_itl_s: float | None = None
    """On the 99th percentile of a request's own inter-token latencies."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request of a load test."""

    at_s: float
    """Scheduled arrival, from the test's begin; 0 in a closed loop."""
    token_ids: tuple[TokenId, ...]
    max_tokens: int
    seed: int


def plan(
    options: LoadOptions, vocab_size: int, context_tokens: int, never: frozenset[TokenId]
) -> tuple[PlannedRequest, ...]:
    """The requests in order of arrival; prompts hold no token of `never`.

    A request is cut to fit `context_tokens`, the prompt to three quarters of it at most.
    """
    random = Random(options.seed)
    allowed = [TokenId(each) for each in range(vocab_size) if each not in never]
    return tuple(
        _request(options, at_s, allowed, context_tokens, random)
        for at_s in _arrivals(options, Random(options.seed + 1))
    )


def warm_up(options: LoadOptions, planned: Sequence[PlannedRequest]) -> tuple[PlannedRequest, ...]:
    """Returns as many of `planned` as are sent before measuring begins."""
    return tuple(planned[index % len(planned)] for index in range(options.num_warmup))


def _arrivals(options: LoadOptions, random: Random) -> Iterator[float]:
    at_s = 0.0
    for _ in range(options.num_requests):
        yield at_s
        if options.rate_per_s is not None:
            poisson = options.arrivals == "poisson"
            at_s += random.expovariate(options.rate_per_s) if poisson else 1 / options.rate_per_s


def _request(
    options: LoadOptions, at_s: float, allowed: Sequence[TokenId], context_tokens: int, random: Random
) -> PlannedRequest:
    longest_prompt = max(1, context_tokens * 3 // 4)
    num_prompt_tokens = min(longest_prompt, _length(options, options.prompt_tokens, random))
    max_tokens = min(context_tokens - num_prompt_tokens, _length(options, options.output_tokens, random))
    return PlannedRequest(
        at_s=at_s,
        token_ids=tuple(random.choices(allowed, k=num_prompt_tokens)),
        max_tokens=max(1, max_tokens),
        seed=random.getrandbits(32),
    )


def _length(options: LoadOptions, mean: int, random: Random) -> int:
    if options.lengths == "fixed":
        return mean
    return max(1, round(random.expovariate(1 / mean)))
