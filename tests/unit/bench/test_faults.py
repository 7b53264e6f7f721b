"""What `bench.faults` counts, and when a bar is missed."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest

from bench import fault_load
from bench.fault_load import Call, Load, Question, ask
from bench.faults import CASES, RECOVERY_BAR_S, Case, Outcome, _see_recovery, outcome_of
from tandem.errors import Reason, Unavailable
from tandem.types import TokenId, WorkerLoad
from tests.answering_client import AnsweringClient
from tests.manual_clock import ManualClock
from tests.registering import BUSY, IDLE, INFO

KILLED_S = 100.0
WORKER = Case(1, 1, "decode-0")
ROUTER = Case(1, 1, "router", clients_wait=True)
PAUSING = Case(1, 1, "router")


def call(sent_s: float, ended_s: float, error: str = "", *, is_wrong: bool = False) -> Call:
    return Call(KILLED_S + sent_s, KILLED_S + ended_s, error, is_wrong)


def outcome(case: Case, *calls: Call, recovered_s: float | None = 1.0) -> Outcome:
    return outcome_of(case, calls, KILLED_S, None if recovered_s is None else KILLED_S + recovered_s)


def test_a_failure_counts_as_in_flight_if_it_was_sent_before_the_kill() -> None:
    seen = outcome(WORKER, call(-1, 1, "WORKER_LOST"), call(1, 2, "WORKER_LOST"), call(2, 3))

    assert (seen.requests, seen.failed_in_flight, seen.failed_later) == (3, 1, 1)
    assert json.loads(json.dumps(asdict(seen)))["reasons"] == {"WORKER_LOST": 2}  # as it is recorded


def test_service_is_back_with_the_first_success_that_was_sent_after_the_kill() -> None:
    seen = outcome(WORKER, call(-1, 0.5), call(0.1, 0.7, "DRAINING"), call(0.2, 2.0), call(0.3, 1.5))

    assert seen.service_back_s == pytest.approx(1.5)


def test_recovery_of_a_worker_ends_with_the_first_success_after_its_successor_computed() -> None:
    survivor_served = call(0.1, 0.5)

    seen = outcome(WORKER, survivor_served, call(0.6, 2.5), recovered_s=2.0)

    assert seen.service_back_s == pytest.approx(0.5)
    assert seen.recovery_s == pytest.approx(2.5)


def test_recovery_of_a_router_is_service_back() -> None:
    assert outcome(ROUTER, call(0.1, 2.5), recovered_s=None).recovery_s == pytest.approx(2.5)


def test_a_run_without_any_failure_and_with_a_fast_recovery_meets_every_bar() -> None:
    assert outcome(WORKER, call(-1, 1), call(1, 2)).missed == ()


def test_calls_in_flight_on_a_killed_router_may_fail() -> None:
    assert outcome(ROUTER, call(-1, 0, "WORKER_LOST"), call(1, 2)).missed == ()


def test_the_number_of_failures_of_clients_that_only_pause_has_no_bar() -> None:
    assert outcome(PAUSING, call(1, 1, "WORKER_LOST"), call(1, 2)).missed == ()


@pytest.mark.parametrize(
    ("case", "calls", "recovered_s"),
    [
        (WORKER, (call(-1, 1, "WORKER_LOST"), call(1, 2)), 1.0),
        (WORKER, (call(1, 2, "NO_CAPABLE_WORKER"), call(1, 2)), 1.0),
        (WORKER, (call(-1, 1, is_wrong=True), call(1, 2)), 1.0),
        (WORKER, (call(-1, 1), call(1, 2)), None),
        (WORKER, (call(-1, 1), call(1, RECOVERY_BAR_S + 0.1)), RECOVERY_BAR_S),
        (ROUTER, (call(1, 2, "WORKER_LOST"), call(1, 2)), None),
        (ROUTER, (call(-1, 1),), None),
        (PAUSING, (call(1, 2, is_wrong=True), call(1, 2)), None),
    ],
)
def test_a_bar_is_missed(case: Case, calls: tuple[Call, ...], recovered_s: float | None) -> None:
    assert outcome(case, *calls, recovered_s=recovered_s).missed


@pytest.mark.parametrize(
    ("heard", "error", "is_wrong"),
    [
        ([1, 2, 3], None, False),
        ([1, 2], None, True),
        ([1, 9, 3], None, True),
        ([1, 2], Unavailable("gone", Reason.WORKER_LOST), False),
        ([1, 9], Unavailable("gone", Reason.WORKER_LOST), True),
        ([1, 2, 3, 4], Unavailable("gone", Reason.WORKER_LOST), True),
    ],
)
async def test_tokens_are_compared_as_far_as_they_came(
    heard: list[int], error: Unavailable | None, is_wrong: bool
) -> None:
    answer = tuple(map(TokenId, (1, 2, 3)))

    seen = await ask(AnsweringClient(heard, error=error), Question(0, 4, 3), answer, ManualClock())

    assert seen.is_wrong == is_wrong
    assert seen.error == ("" if error is None else Reason.WORKER_LOST)


def test_every_process_is_killed_in_both_fleets() -> None:
    assert {(case.fleet, case.victim.rstrip("-0")) for case in CASES} == {
        (fleet, victim) for fleet in ("1P1D", "2P2D") for victim in ("decode", "prefill", "router")
    }


async def test_a_load_of_which_no_request_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_load, "MOST_BETWEEN_ENDS_S", 0.01)

    with pytest.raises(TimeoutError):
        await Load("127.0.0.1:1", 1, 1, []).ended(1)


class Status:
    """A router that has one worker, whose process has this id; a look at it takes 25 s."""

    def __init__(self, clock: ManualClock, pid: int, *loads: WorkerLoad) -> None:
        self._clock = clock
        self._info = replace(INFO, pid=pid)
        self._loads = iter(loads)
        self._load = IDLE

    async def status(self) -> SimpleNamespace:
        self._clock.advance_s(25.0)
        self._load = next(self._loads, self._load)
        return SimpleNamespace(workers=[SimpleNamespace(info=self._info, load=self._load, connected=True)])


@pytest.mark.parametrize(
    ("pid", "loads", "seen_s"),
    [
        (2, (IDLE, replace(BUSY, engine_steps=IDLE.engine_steps + 1)), 50.0),
        (2, (IDLE, BUSY), None),
        (1, (IDLE, replace(BUSY, engine_steps=IDLE.engine_steps + 1)), None),
    ],
    ids=["its successor computed", "its successor did nothing", "only the one that was killed"],
)
async def test_a_worker_has_recovered_once_its_successor_computed(
    pid: int, loads: tuple[WorkerLoad, ...], seen_s: float | None
) -> None:
    clock = ManualClock(0.0)
    router: Any = Status(clock, pid, *loads)

    assert await _see_recovery(router, "decode-0", 1, clock) == seen_s
