"""Goodput in pairs: which rates are tried, what a trial counts, and what a server passes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from bench.goodput import QUICK, climb, pairs_table, server_document
from bench.goodput_trial import FAILED, Arrival, Objectives, Outcome, Trial, passes, run_trial
from bench.peers.process import PeerError
from bench.support.streams import OnFirst, Prompt, Stream

OBJECTIVES = Objectives(ttft_s=1.0, itl_s=0.1)
GOOD, LATE = Outcome(0.5, 0.05), Outcome(2.0, 0.05)


def trial_of(outcomes: Sequence[Outcome], rate_per_s: float = 1.0, seed: int = 13) -> Trial:
    return Trial(rate_per_s, seed, OBJECTIVES, tuple(outcomes), client_cpu_share=0.01, seconds=1.0)


def test_an_outcome_counts_from_the_time_at_which_the_request_was_due() -> None:
    outcome = Outcome.of(10.0, [10.5, 10.6, 10.7, 11.7])
    assert (outcome.ttft_s, outcome.itl_s) == pytest.approx((0.5, 0.1 + 0.9 * 0.9))
    assert Outcome.of(0.0, [0.5]) == Outcome(0.5, 0.0)


@pytest.mark.parametrize(
    ("outcome", "misses"),
    [
        (Outcome(1.0, 0.1), (False, False)),
        (Outcome(1.01, 0.1), (True, False)),
        (Outcome(1.0, 0.11), (False, True)),
        (FAILED, (True, True)),
    ],
)
def test_a_request_attains_if_it_meets_both_objectives(outcome: Outcome, misses: tuple[bool, bool]) -> None:
    assert (outcome.misses_first(OBJECTIVES), outcome.misses_between(OBJECTIVES)) == misses
    assert outcome.attains(OBJECTIVES) is not any(misses)


def test_a_tenth_of_the_requests_of_all_trials_may_miss() -> None:
    assert passes([trial_of([GOOD] * 9 + [LATE])])
    assert not passes([trial_of([GOOD] * 8 + [LATE, FAILED])])
    assert passes([trial_of([GOOD] * 8 + [LATE, FAILED]), trial_of([GOOD] * 10)])


def test_a_trial_says_what_was_missed() -> None:
    document = trial_of([GOOD, LATE, Outcome(2.0, 0.2), FAILED]).document()
    assert document["attainment"] == 0.25
    assert (document["missed_first"], document["missed_between"], document["failed"]) == (3, 2, 1)
    assert document["ttft_ms"]["p50"] == pytest.approx(2000)


class Server:
    """Answers each request in the time that its prompt's length says, in hundredths of a second; fails at 13."""

    async def generate(self, prompt: Prompt, max_tokens: int, on_first: OnFirst | None = None) -> Stream:
        if len(prompt) == 13:
            raise PeerError("broke")
        sent_s = asyncio.get_running_loop().time()
        return Stream(sent_s, tuple((sent_s + len(prompt) / 100 * (1 + n), 1) for n in range(max_tokens)))


async def test_a_request_that_fails_counts_as_missed_and_the_others_go_on() -> None:
    requests = [Arrival(0.0, 13, 2), Arrival(0.0, 5, 2), Arrival(0.01, 7, 3)]
    trial = await run_trial(Server(), requests, 1.0, 13, OBJECTIVES, 100, seed=1)
    assert [each.failed for each in trial.outcomes] == [True, False, False]
    assert trial.attained == 2


async def climbed(capacity: dict[str, float]) -> tuple[list[tuple[list[str], float]], dict[str, list[Trial]]]:
    """What was tried in order, and all trials, where a server passes up to its capacity."""
    tried: list[tuple[list[str], float]] = []

    async def measure(names: Sequence[str], rate_per_s: float) -> dict[str, list[Trial]]:
        tried.append((list(names), round(rate_per_s, 3)))
        return {name: [trial_of([GOOD if rate_per_s <= capacity[name] else LATE], rate_per_s)] for name in names}

    return tried, await climb(list(capacity), 1.0, QUICK, measure)


async def test_rates_rise_with_who_passes_and_fall_with_who_does_not() -> None:
    tried, trials = await climbed({"strong": 1.5, "weak": 0.8})
    assert tried[0] == (["strong", "weak"], 1.0)
    assert tried[1:] == [(["strong"], 1.3), (["weak"], 0.769), (["strong"], 1.69)]
    strong, weak = (server_document(trials[name]) for name in ("strong", "weak"))
    assert (strong["goodput_per_s"], strong["failed_per_s"]) == pytest.approx((1.3, 1.69))
    assert (weak["goodput_per_s"], weak["failed_per_s"]) == pytest.approx((1 / 1.3, 1.0))


def test_servers_are_told_apart_by_trials_that_met_the_same_arrivals() -> None:
    first = [trial_of([GOOD] * 10, seed=seed) for seed in (1, 2)]
    other = [trial_of([GOOD] * missed + [LATE] * (10 - missed), seed=seed) for seed, missed in ((1, 8), (2, 6))]
    servers = {"first": server_document(first), "other": server_document(other)}
    rendered = pairs_table({"loads": {"mixed": {"servers": servers}}})
    assert "| mixed | 1.00 | other | 14 of 20 | 6, 0 | -3.0 ± 12.7 |" in rendered
