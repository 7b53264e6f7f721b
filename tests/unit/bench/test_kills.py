"""What `bench.soak.kills` counts, and when a bar is missed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from bench.soak.kills import RECOVERY_BAR_S, Case, Outcome, outcome_of, see_recovery
from bench.support.witness import Sighting
from tandem.types import WorkerLoad
from tests.manual_clock import ManualClock
from tests.registering import BUSY, IDLE, INFO

KILLED_S = 100.0
WORKER = Case(1, 1, "decode-0")
ROUTER = Case(1, 1, "router", clients_wait=True)
PAUSING = Case(1, 1, "router")


def call(sent_s: float, ended_s: float, error: str = "", *, is_wrong: bool = False) -> Sighting:
    error = "tokens differ" if is_wrong else f"{error}: gone" if error else ""
    return Sighting("", error, is_wrong, 3, KILLED_S + sent_s, KILLED_S + ended_s, 0.1, 0.1)


def outcome(case: Case, *calls: Sighting, recovered_s: float | None = 1.0) -> Outcome:
    return outcome_of(case, calls, KILLED_S, None if recovered_s is None else KILLED_S + recovered_s)


def test_a_failure_counts_as_in_flight_if_it_was_sent_before_the_kill() -> None:
    seen = outcome(WORKER, call(-1, 1, "WORKER_LOST"), call(1, 2, "WORKER_LOST"), call(2, 3))
    assert (seen.requests, seen.failed_in_flight, seen.failed_later) == (3, 1, 1)
    assert seen.reasons == {"WORKER_LOST": 2}


@pytest.mark.parametrize(
    ("case", "calls", "recovered_s", "is_missed"),
    [
        (WORKER, (call(-1, 1), call(1, 2)), 1.0, False),
        (ROUTER, (call(-1, 0, "WORKER_LOST"), call(1, 2)), 1.0, False),
        (PAUSING, (call(1, 1, "WORKER_LOST"), call(1, 2)), 1.0, False),
        (WORKER, (call(-1, 1, "WORKER_LOST"), call(1, 2)), 1.0, True),
        (WORKER, (call(-1, 1, is_wrong=True), call(1, 2)), 1.0, True),
        (WORKER, (call(-1, 1), call(1, 2)), None, True),
        (WORKER, (call(-1, 1), call(1, RECOVERY_BAR_S + 0.1)), RECOVERY_BAR_S, True),
        (ROUTER, (call(1, 2, "WORKER_LOST"), call(1, 2)), None, True),
        (ROUTER, (call(-1, 1),), None, True),
        (PAUSING, (call(1, 2, is_wrong=True), call(1, 2)), None, True),
    ],
)
def test_a_bar_is_missed(case: Case, calls: tuple[Sighting, ...], recovered_s: float | None, is_missed: bool) -> None:
    assert bool(outcome(case, *calls, recovered_s=recovered_s).missed) is is_missed


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
    assert await see_recovery(router, "decode-0", 1, clock) == seen_s
