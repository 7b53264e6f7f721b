"""How many prompt tokens a step computes beside its decodes."""

from __future__ import annotations

import random

import pytest

from worker.budget import ChunkBudget
from worker.tuning import OBJECTIVE_STEPS

CHUNK = 512
GRAIN_TOKENS = 4


def learned(
    objective_s: float | None = None, ratio: float = 1000.0, *, decode_s: float = 0.02, per_s: float = 4000.0
) -> ChunkBudget:
    """On a worker whose decode steps of 8 take `decode_s`, and where prompts cost the same wherever they are."""
    budget = ChunkBudget(CHUNK, objective_s, ratio)
    for _ in range(200):
        budget.step_took(0, CHUNK, CHUNK / per_s)
        budget.step_took(8, 0, decode_s)
        budget.step_took(8, 64, decode_s + 64 / per_s)
    return budget


def test_a_prompt_alone_gets_the_whole_chunk() -> None:
    assert ChunkBudget(CHUNK).tokens(0, 1) == CHUNK
    assert ChunkBudget(CHUNK, alone_tokens=CHUNK // 4).tokens(0, 1) == CHUNK // 4
    assert ChunkBudget(CHUNK, alone_tokens=2 * CHUNK).tokens(0, 1) == CHUNK
    assert learned().tokens(0, 3) == CHUNK


def test_before_anything_is_known_a_chunk_beside_streams_is_small() -> None:
    assert ChunkBudget(CHUNK).tokens(8, 1) == 8 * GRAIN_TOKENS
    assert ChunkBudget(4).tokens(8, 1) == 4


def test_a_step_with_a_chunk_takes_no_longer_than_the_objective() -> None:
    for objective_s in (0.03, 0.05, 0.1):
        tokens = learned(objective_s).tokens(8, 1)
        assert tokens % GRAIN_TOKENS == 0
        assert objective_s - GRAIN_TOKENS / 4000 - 1e-4 <= 0.02 + tokens / 4000 <= objective_s + 1e-4


def test_without_an_objective_of_its_own_a_step_may_be_a_multiple_of_the_shortest_decode_step() -> None:
    budget = learned()
    assert 0.02 + budget.tokens(8, 1) / 4000 <= OBJECTIVE_STEPS * 0.02
    for _ in range(100):
        budget.step_took(60, 0, 0.08)
    assert budget.step_objective_s == pytest.approx(OBJECTIVE_STEPS * 0.02)
    assert budget.tokens(60, 1) == GRAIN_TOKENS


def test_an_objective_of_0_bounds_nothing() -> None:
    assert learned(0.0).tokens(8, 1) == CHUNK
    assert learned(0.0).step_objective_s == 0


@pytest.mark.parametrize(("waits", "share"), [(3, 3 / 8), (6, 6 / 8), (7.9, 7.9 / 8)])
def test_prompts_get_the_share_of_a_step_that_their_line_needs(waits: float, share: float) -> None:
    tokens = learned(0.021, 8.0).tokens(8, waits)
    assert tokens == pytest.approx(min(CHUNK, 0.02 * share / (1 - share) * 4000), abs=GRAIN_TOKENS)


def test_what_the_objective_leaves_is_never_cut_by_a_short_line() -> None:
    assert learned(0.06, 8.0).tokens(8, 1) == learned(0.06).tokens(8, 1)


def test_chunks_are_whole_for_a_line_that_not_even_the_whole_worker_serves_in_time() -> None:
    assert learned(0.03, 8.0).tokens(8, 8) == CHUNK


def test_the_worst_off_of_a_line_waits_so_many_times_its_own_time() -> None:
    budget = learned(decode_s=0.001, per_s=1000.0)  # a step as long as a token
    assert budget.wait_ratio([]) == 0
    assert budget.wait_ratio([700]) == 1
    assert budget.wait_ratio([255] * 8) == pytest.approx(2041 / 256)
    assert budget.wait_ratio([9, 89, 1999]) == pytest.approx(99 / 90)
    assert budget.wait_ratio([1999, 49]) == pytest.approx(2049 / 50)


def test_a_prompt_s_own_time_is_at_least_a_step_as_long_as_it_was_measured() -> None:
    slow_steps = learned(decode_s=0.027, per_s=7800.0)  # a large model on a fast processor: as long as 210 tokens
    fast_steps = learned(decode_s=0.012, per_s=1250.0)
    line = [2000, 30]
    assert slow_steps.wait_ratio(line) == pytest.approx((2030 + 210.6) / (30 + 210.6))
    assert fast_steps.wait_ratio(line) == pytest.approx((2030 + 15) / (30 + 15))


def test_how_long_a_step_will_take_is_known_once_steps_have_ended() -> None:
    assert ChunkBudget(CHUNK).least_step_s(8, 100) == 0
    assert learned().least_step_s(8, 100) == pytest.approx(0.02 + 100 / 4000)
    assert learned().least_step_s(0, CHUNK) == pytest.approx(CHUNK / 4000)


def test_short_chunks_do_not_raise_the_least_time_of_a_long_one() -> None:
    budget = ChunkBudget(2048)
    budget.step_took(128, 0, 0.0104)
    budget.step_took(128, 1920, 0.050)
    for number in range(60):  # as on an H200, with the noise of a moving decode step
        budget.step_took(128, 64, 0.0118 + 0.0003 * (number % 3 - 1))
    assert budget.least_step_s(128, 1920) <= 0.055


def test_when_mixed_steps_take_longer_than_expected_the_next_ones_get_less() -> None:
    budget = learned(0.04)
    before = budget.tokens(8, 1)
    for _ in range(100):
        budget.step_took(8, before, 0.06)
    assert budget.tokens(8, 1) < 0.6 * before
    for _ in range(100):
        budget.step_took(8, before, 0.04)
    assert budget.tokens(8, 1) == pytest.approx(before, rel=0.15)


def test_a_decode_step_that_was_never_seen_alone_is_told_from_mixed_ones() -> None:
    budget = ChunkBudget(CHUNK, 0.06)
    for _ in range(50):
        budget.step_took(0, CHUNK, CHUNK / 4000)
        budget.step_took(8, 32, 0.02 + 32 / 4000)
    assert budget.step_s == pytest.approx(0.02)
    assert 0.02 + budget.tokens(8, 1) / 4000 <= 0.06 + 1e-4


def test_a_whole_chunk_beside_a_stream_tells_nothing_of_how_long_decodes_take() -> None:
    budget = learned()
    budget.step_took(1, CHUNK, 0.64)
    assert budget.step_objective_s == pytest.approx(OBJECTIVE_STEPS * 0.02)


def test_steps_that_other_processes_slowed_down_count_less() -> None:
    budget = learned()
    budget.step_took(8, 0, 0.1)
    for _ in range(3):
        budget.step_took(8, 0, 0.02)
    assert budget.step_s == pytest.approx(0.02, rel=0.1)


def test_a_size_that_was_not_seen_is_taken_for_the_next_one() -> None:
    assert learned(0.05).tokens(20, 1) == learned(0.05).tokens(8, 1)


def test_what_is_reported_is_what_prompts_get_as_things_are() -> None:
    budget = learned(0.04)
    assert budget.prompt_tokens_per_s(0, 1) == pytest.approx(4000)
    assert budget.prompt_tokens_per_s(8, 1) == pytest.approx(2000)
    assert (budget.step_s, budget.step_objective_s) == (pytest.approx(0.02), 0.04)
    nothing = ChunkBudget(CHUNK)
    assert (nothing.prompt_tokens_per_s(8, 1), nothing.step_s, nothing.step_objective_s) == (0, 0, 0)


def test_it_follows_when_steps_become_slower() -> None:
    budget = learned(0.05)
    before = budget.tokens(8, 1)
    for _ in range(100):
        budget.step_took(8, 0, 0.04)
        budget.step_took(8, 64, 0.04 + 64 / 2000)
    assert budget.tokens(8, 1) < before


@pytest.mark.parametrize("seed", range(20))
def test_whatever_was_measured_a_chunk_is_within_its_bounds(seed: int) -> None:
    draw = random.Random(seed)
    budget = ChunkBudget(CHUNK, draw.choice([None, 0.0, 0.02, 1.0]), draw.choice([1.0, 4.0]))
    for _ in range(300):
        decodes, prompt_tokens = draw.choice([(0, 100), (draw.randint(1, 70), draw.choice([0, 32, 500]))])
        budget.step_took(decodes, prompt_tokens, draw.choice([0.0, 1e-6, 0.01, 5.0]))
        tokens = budget.tokens(draw.randint(0, 70), draw.randint(0, 70))
        assert tokens == CHUNK or (GRAIN_TOKENS <= tokens < CHUNK and tokens % GRAIN_TOKENS == 0)
        assert budget.prompt_tokens_per_s(draw.randint(0, 9), 1) >= 0
