"""Simulated deployments: closed forms, equal seeds, nothing lost, workers that come and go."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from itertools import pairwise
from statistics import NormalDist

import pytest

from simulator.cluster import Failures, Fleet, Policy, Setup, simulate
from simulator.costs import CostModel, Sharing, StepCosts
from simulator.outcomes import Slo
from simulator.sizing import highest_rate, least_fleet, passes
from simulator.traces import Ask, Dialogue, LogNormal, Piece, conversation, independent

PROMPT_S, STEP_S, MESSAGE_S = 0.1, 0.02, 0.001
COSTS = CostModel(
    StepCosts(base=STEP_S, per_prompt_token=(PROMPT_S - STEP_S) / 100),
    pool_blocks=512,
    kv_bytes_per_token=1000,
    message_s=MESSAGE_S,
)
"""A prompt of 100 tokens takes 0.1 s, and a step without prompts 0.02 s, however many sequences."""
FLEETS = [Fleet(Policy.STATIC, 2, 1), Fleet(Policy.COLOCATED, 2), Fleet(Policy.AUTO, 3)]
SHORT = LogNormal(60, 0.7, 4, 400)
LONG_AGO = Slo(ttft_s=1e6, itl_s=1e6)


def _ask(at_s: float, number: int, output_tokens: int = 1) -> Ask:
    return Ask(at_s, (Piece(number + 1, 100),), output_tokens)


def _one_at_a_time() -> CostModel:
    return replace(COSTS, prefill_chunk_tokens=100)


def test_requests_far_apart_take_what_their_steps_and_messages_take() -> None:
    trace = [_ask(10.0 * number, number, output_tokens=5) for number in range(3)]
    result = simulate(Setup(Fleet(Policy.COLOCATED, 1), COSTS), trace)
    for each in result.outcomes:
        assert each.ttft_s == pytest.approx(PROMPT_S + 4 * MESSAGE_S)
        assert each.itl_s == pytest.approx(STEP_S)
        assert each.output_tokens == 5


@pytest.mark.parametrize(("per_host", "times"), [(1, 1.0), (2, 1.5)])
def test_workers_of_one_host_are_slower_while_both_compute(per_host: int, times: float) -> None:
    """Two prompts at once, each on a worker of its own, both for the same time."""
    costs = replace(COSTS, sharing=Sharing(decode=1.2, prompt=1.5), workers_per_host=per_host)
    result = simulate(Setup(Fleet(Policy.COLOCATED, 2), costs), [_ask(0.0, 0), _ask(0.0, 1)])
    for each in result.outcomes:
        assert each.ttft_s == pytest.approx(times * PROMPT_S + 4 * MESSAGE_S)
    (use,) = result.uses.values()
    at_the_worker_s = result.outcomes[0].ended_s - 2 * MESSAGE_S
    assert use.busy_share * at_the_worker_s == pytest.approx(times * PROMPT_S)


def test_a_step_is_slower_only_for_as_long_as_another_worker_computes() -> None:
    """The second prompt comes in the middle of the first: alone, then both at half speed, then alone."""
    costs = replace(COSTS, sharing=Sharing(prompt=2.0), workers_per_host=2)
    result = simulate(Setup(Fleet(Policy.COLOCATED, 2), costs), [_ask(0.0, 0), _ask(PROMPT_S / 2, 1)])
    for each in result.outcomes:
        assert each.ttft_s == pytest.approx(1.5 * PROMPT_S + 4 * MESSAGE_S)


def test_steps_differ_by_the_jitter_and_their_median_is_that_of_the_costs() -> None:
    quiet, noisy = (replace(COSTS, jitter=each) for each in (0.0, 0.2))
    trace = [_ask(10.0 * number, number, output_tokens=100) for number in range(10)]
    gaps_s = [
        statistics.median(
            each.itl_s or 0.0 for each in simulate(Setup(Fleet(Policy.COLOCATED, 1), costs), trace).outcomes
        )
        for costs in (quiet, noisy)
    ]
    assert gaps_s == [
        pytest.approx(STEP_S),
        pytest.approx(STEP_S * math.exp(0.2 * NormalDist().inv_cdf(0.95)), rel=0.05),
    ]


def test_long_steps_differ_by_as_much_as_short_ones() -> None:
    trace = [_ask(10.0 * number, number) for number in range(100)]  # of one step each, five times as long as a decode
    result = simulate(Setup(Fleet(Policy.COLOCATED, 1), replace(COSTS, jitter=0.2)), trace)
    ttft_s = sorted((each.ttft_s or 0.0) - 4 * MESSAGE_S for each in result.outcomes)
    assert statistics.median(ttft_s) == pytest.approx(PROMPT_S, rel=0.02)
    assert ttft_s[95] - PROMPT_S == pytest.approx(STEP_S * math.expm1(0.2 * NormalDist().inv_cdf(0.95)), rel=0.4)


def test_prompts_that_come_evenly_wait_as_a_deterministic_queue_does() -> None:
    """D/D/1 above its capacity: the n-th waits n times what service takes longer than arrivals are apart."""
    apart_s, count = 0.8 * PROMPT_S, 20
    trace = [_ask(apart_s * number, number) for number in range(count)]
    result = simulate(Setup(Fleet(Policy.STATIC, 1, 1), _one_at_a_time()), trace)
    last = result.outcomes[-1].ttft_s
    assert last == pytest.approx(4 * MESSAGE_S + PROMPT_S + (count - 1) * (PROMPT_S - apart_s), abs=1e-6)


@pytest.mark.parametrize("load", [0.5, 0.7])
def test_poisson_prompts_wait_as_in_an_md1_queue(load: float) -> None:
    """Pollaczek-Khinchine, service of constant length: the mean wait is load / (2 (1 - load)) services."""
    count = 700
    trace = independent(LogNormal(100, 0, 100, 100), LogNormal(1, 0, 1, 1), load / PROMPT_S, count, seed=5)
    result = simulate(Setup(Fleet(Policy.STATIC, 1, 1), _one_at_a_time()), trace)
    mean_s = sum(each.ttft_s or 0.0 for each in result.outcomes) / count - 4 * MESSAGE_S - PROMPT_S
    assert mean_s == pytest.approx(PROMPT_S * load / (2 * (1 - load)), rel=0.35)


def test_a_handoff_takes_what_its_bytes_take() -> None:
    slow = replace(COSTS, handoff_bytes_per_s=1e6, handoff_s=0.5)
    trace = [_ask(0.0, 0, output_tokens=2)]
    result = simulate(Setup(Fleet(Policy.STATIC, 1, 1), slow), trace)
    assert result.handoff_bytes == 7 * 16 * 1000  # 100 tokens lie in 7 blocks of 16
    (outcome,) = result.outcomes
    assert outcome.ttft_s == pytest.approx(PROMPT_S + 4 * MESSAGE_S)
    assert outcome.itl_s is not None
    assert 0.112 + 0.25 + STEP_S < outcome.itl_s < 0.112 + 0.5 + STEP_S + 0.1


@pytest.mark.parametrize("fleet", FLEETS, ids=lambda fleet: fleet.name)
@pytest.mark.parametrize("failures", [None, Failures(2.0, 3.0)], ids=["sound", "failing"])
def test_every_request_ends_once_and_all_blocks_are_free_at_the_end(fleet: Fleet, failures: Failures | None) -> None:
    """Failing: from the second loss on, two workers have lives of one second, by turns."""
    trace = independent(SHORT, LogNormal(20, 0.5, 1, 100), 6.0, 60, seed=1, variation=2.0)
    result = simulate(Setup(fleet, replace(COSTS, pool_blocks=64), failures), trace)  # raises if a block is held
    assert [each.at_s for each in result.outcomes] == [ask.at_s for ask in trace]
    assert [each.output_tokens for each in result.outcomes] == [ask.output_tokens for ask in trace]
    assert not any(each.failed for each in result.outcomes)
    assert sum(use.workers for use in result.uses.values()) == fleet.num_workers
    if failures:
        assert result.num_lost > 1
        assert sum(each.replays for each in result.outcomes) > 0


@pytest.mark.parametrize("fleet", FLEETS, ids=lambda fleet: fleet.name)
def test_equal_seeds_give_equal_results(fleet: Fleet) -> None:
    def run(seed: int) -> dict[str, object]:
        trace = independent(SHORT, LogNormal(20, 0.5, 1, 100), 6.0, 30, seed)
        return simulate(Setup(fleet, COSTS, Failures(2.0, 1.0), seed=seed), trace).document(LONG_AGO)

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_later_turns_of_a_conversation_are_found_in_caches() -> None:
    dialogue = Dialogue(64, LogNormal(4, 0.2, 2, 6), LogNormal(40, 0.5, 8, 100), LogNormal(20, 0.2, 8, 40), pause_s=5)
    trace = conversation(dialogue, 2.0, 40, seed=1)
    result = simulate(Setup(Fleet(Policy.COLOCATED, 2), COSTS), trace)
    assert result.document(LONG_AGO)["cached_share"] > 0.4  # type: ignore[operator]


def test_only_so_many_requests_run_at_a_time_as_the_router_admits() -> None:
    trace = [_ask(0.0, number, output_tokens=10) for number in range(4)]
    one_by_one = simulate(Setup(Fleet(Policy.COLOCATED, 4), COSTS, max_active=1), trace)
    ends = sorted(each.ended_s for each in one_by_one.outcomes)
    assert all(after - before > PROMPT_S for before, after in pairwise(ends))


def test_the_least_fleet_passes_and_a_smaller_one_does_not() -> None:
    trace = independent(SHORT, LogNormal(20, 0.5, 2, 60), 12.0, 20, seed=1)
    slo = Slo(ttft_s=0.4, itl_s=0.1)
    for policy in Policy:
        found = least_fleet(Setup(Fleet(policy, 1, 1), COSTS), trace, slo, policy, 8)
        assert found is not None
        fleet, result = found
        assert passes(result, slo)
        if fleet.decodes > 1:
            less = replace(fleet, decodes=fleet.decodes - 1)
            assert not passes(simulate(Setup(less, COSTS), trace), slo)
    assert least_fleet(Setup(Fleet(Policy.AUTO, 1), COSTS), trace, Slo(0.01, 0.001), Policy.AUTO, 4) is None


def test_the_highest_rate_is_near_what_the_prompts_allow() -> None:
    """Prompts alone, objectives generous: utilisation near 1."""

    def make(rate_per_s: float) -> list[Ask]:
        return list(independent(LogNormal(100, 0, 100, 100), LogNormal(1, 0, 1, 1), rate_per_s, 40, seed=2))

    rate = highest_rate(Setup(Fleet(Policy.STATIC, 1, 1), _one_at_a_time()), make, Slo(0.5, 1.0), 8.0, ratio=1.1)
    assert 0.5 / PROMPT_S < rate < 1.3 / PROMPT_S
