"""The chunk budget where a mixed step has a fixed cost, on simulated time: an 8B model on one H200, 16 callers.

Two shapes of that cost, of 0 to 20 ms: `added` to what decodes and prompt tokens take; or `hiding` them, as the host's
time to launch a step's kernels hides the device's. Whole chunks are what `--inter-token-objective 0` gives.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from worker.budget import ChunkBudget
from worker.tuning import FIXED_COSTS

CHUNK, ALONE = 2048, 4096
TOKENS_PER_S = 43_000.0
CALLERS, REQUESTS = 16, 80
PROMPT_TOKENS, OUTPUT_TOKENS = 4096, 256
BETWEEN_REQUESTS_S = 0.004
FIXED_MS = (0, 0.5, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 18, 20)
StepTime = Callable[[float, int, int], float]
"""Seconds of a step with that fixed cost, so many decodes and so many prompt tokens."""


def decode_s(num_decodes: int) -> float:
    return 0.005 + 0.00005 * num_decodes


def added(fixed_s: float, num_decodes: int, num_prompt_tokens: int) -> float:
    return decode_s(num_decodes) + (fixed_s + num_prompt_tokens / TOKENS_PER_S if num_prompt_tokens else 0.0)


def hiding(fixed_s: float, num_decodes: int, num_prompt_tokens: int) -> float:
    device_s = decode_s(num_decodes) + num_prompt_tokens / TOKENS_PER_S
    return max(0.005 + fixed_s, device_s) if num_prompt_tokens else device_s


@dataclass
class Prompt:
    num_left: int = PROMPT_TOKENS


@dataclass
class Stream:
    num_left: int
    told_s: float


@dataclass
class Seen:
    """What a run of the closed loop showed."""

    tokens_per_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    mixed: list[tuple[int, float]] = field(default_factory=list)
    """Prompt tokens of each mixed step, and its seconds beyond a decode step."""

    @property
    def prompt_rate(self) -> float:
        return sum(tokens for tokens, _ in self.mixed) / sum(seconds for _, seconds in self.mixed)

    @property
    def gap_p95_s(self) -> float:
        return sorted(self.gaps_s)[95 * len(self.gaps_s) // 100]


def run(step_time: StepTime, fixed_ms: float, objective_s: float | None = None, noise: float = 0.0) -> Seen:
    """Callers who send the next request when one has ended. `noise`: mean share by which steps take longer."""
    rng, seen = random.Random(0), Seen()
    budget = ChunkBudget(CHUNK, objective_s, 3.0, ALONE)
    now_s, num_ended, num_tokens = 0.0, 0, 0
    arrivals = [BETWEEN_REQUESTS_S * number for number in range(CALLERS)]
    line: list[Prompt] = []
    streams: list[Stream] = []
    while num_ended < REQUESTS:
        if not line and not streams:
            now_s = max(now_s, min(arrivals))
        line += [Prompt() for at_s in arrivals if at_s <= now_s]
        arrivals = [at_s for at_s in arrivals if at_s > now_s]
        num_decodes, num_prompt_tokens = len(streams), _compute(budget, line, len(streams))
        seconds = step_time(fixed_ms / 1000, num_decodes, num_prompt_tokens)
        seconds *= 1 + (rng.expovariate(1 / noise) if noise else 0.0)
        now_s += seconds
        budget.step_took(num_decodes, num_prompt_tokens, seconds)
        if num_decodes and num_prompt_tokens:
            seen.mixed.append((num_prompt_tokens, seconds - decode_s(num_decodes)))
        for stream in streams:
            seen.gaps_s.append(now_s - stream.told_s)
            stream.num_left, stream.told_s = stream.num_left - 1, now_s
        ended = [stream for stream in streams if not stream.num_left]
        num_ended += len(ended)
        arrivals += [now_s + BETWEEN_REQUESTS_S] * len(ended)
        lengths = [rng.randint(OUTPUT_TOKENS // 2, 3 * OUTPUT_TOKENS // 2) for each in line if not each.num_left]
        num_tokens += sum(lengths)
        line = [prompt for prompt in line if prompt.num_left]
        streams = [stream for stream in streams if stream.num_left] + [Stream(each - 1, now_s) for each in lengths]
    seen.tokens_per_s = num_tokens / now_s
    return seen


def _compute(budget: ChunkBudget, line: list[Prompt], num_decodes: int) -> int:
    """Gives the prompts of the line their tokens of the next step; returns how many."""
    if not line:
        return 0
    left = most = budget.tokens(num_decodes, budget.wait_ratio(each.num_left for each in line))
    for prompt in line:
        tokens = min(prompt.num_left, left)
        prompt.num_left, left = prompt.num_left - tokens, left - tokens
    return most - left


@pytest.mark.parametrize("objective_s", [None, 0.015])
@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("step_time", [added, hiding])
def test_throughput_falls_off_no_cliff_as_the_fixed_cost_grows(
    step_time: StepTime, noise: float, objective_s: float | None
) -> None:
    shares = [
        run(step_time, each, objective_s, noise).tokens_per_s / run(step_time, each, 0.0, noise).tokens_per_s
        for each in FIXED_MS
    ]
    assert min(shares) > 0.75
    assert max(abs(b - a) for a, b in pairwise(shares)) < 0.12


@pytest.mark.parametrize("step_time", [added, hiding])
def test_gaps_between_tokens_grow_smoothly_with_the_fixed_cost_and_never_beyond_those_of_whole_chunks(
    step_time: StepTime,
) -> None:
    gaps_s = [run(step_time, each).gap_p95_s for each in FIXED_MS]
    for fixed_ms, gap_s in zip(FIXED_MS, gaps_s, strict=True):
        assert gap_s <= run(step_time, fixed_ms, 0.0).gap_p95_s + 0.001
    assert max(b - a for a, b in pairwise(gaps_s)) < 0.02


@pytest.mark.parametrize("step_time", [added, hiding])
def test_prompts_keep_two_thirds_of_their_rate_in_whole_chunks_however_high_the_fixed_cost_is(
    step_time: StepTime,
) -> None:
    for fixed_ms in FIXED_MS:
        assert run(step_time, fixed_ms).prompt_rate >= 0.65 * run(step_time, fixed_ms, 0.0).prompt_rate


def learned(fixed_s: float, objective_s: float | None, num_decodes: int, sizes: tuple[int, ...]) -> ChunkBudget:
    """After steps alone, and mixed ones whose chunks had these sizes."""
    budget = ChunkBudget(CHUNK, objective_s, 1000.0)
    for _ in range(40):
        budget.step_took(0, CHUNK, added(fixed_s, 1, CHUNK))
        budget.step_took(num_decodes, 0, decode_s(num_decodes))
        for size in sizes:
            budget.step_took(num_decodes, size, added(fixed_s, num_decodes, size))
    return budget


@pytest.mark.parametrize("seed", range(20))
def test_a_chunk_takes_about_twice_the_fixed_cost_where_the_objective_leaves_it_less(seed: int) -> None:
    draw = random.Random(seed)
    fixed_s, num_decodes = draw.uniform(0.006, 0.016), draw.randint(1, 64)
    budget = learned(fixed_s, 0.012, num_decodes, (16, 128))
    for _ in range(100):
        tokens = budget.tokens(num_decodes, 1)
        budget.step_took(num_decodes, tokens, added(fixed_s, num_decodes, tokens))
    assert tokens / TOKENS_PER_S == pytest.approx((FIXED_COSTS - 1) * fixed_s, rel=0.25)


@pytest.mark.parametrize("seed", range(20))
def test_where_the_objective_leaves_a_chunk_enough_beside_the_fixed_cost_steps_keep_it(seed: int) -> None:
    draw = random.Random(seed)
    fixed_s, num_decodes, objective_s = draw.uniform(0.0, 0.006), draw.randint(1, 64), draw.uniform(0.035, 0.1)
    budget = learned(fixed_s, objective_s, num_decodes, (16, 128))
    for _ in range(100):
        tokens = budget.tokens(num_decodes, 1)
        budget.step_took(num_decodes, tokens, added(fixed_s, num_decodes, tokens))
    step_s = added(fixed_s, num_decodes, tokens)
    assert 0.75 * objective_s <= step_s <= objective_s or tokens == CHUNK


def test_one_step_that_stood_still_is_forgotten_soon() -> None:
    budget = ChunkBudget(CHUNK, 0.05, 1000.0)
    for _ in range(40):
        budget.step_took(0, CHUNK, added(0.0, 1, CHUNK))
        budget.step_took(8, 0, decode_s(8))
    budget.step_took(8, 16, 2.0)
    for _ in range(60):
        tokens = budget.tokens(8, 1)
        budget.step_took(8, tokens, added(0.0, 8, tokens))
    assert added(0.0, 8, tokens) <= 0.05
