from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.ejection import (
    FIRST_BACKOFF_S,
    IN_A_ROW,
    MAX_BACKOFF_S,
    WINDOW,
    Ejections,
)
from tandem.types import Incarnation

P, Q, D, E = (Incarnation(name) for name in "pqde")


def fail(ejections: Ejections, now_s: float, times: int = IN_A_ROW) -> None:
    for _ in range(times):
        ejections.failed(P, now_s)


def test_one_failure_in_many_is_forgotten() -> None:
    ejections = Ejections()
    for _ in range(100):
        assert ejections.failed(P, 0.0) is None
        for _ in range(WINDOW):
            ejections.succeeded(P)
    assert not ejections._records


def test_after_the_back_off_one_request_at_a_time_probes() -> None:
    ejections = Ejections()
    fail(ejections, 0.0)
    assert ejections.burden(P, FIRST_BACKOFF_S - 0.01) == 1
    now_s = FIRST_BACKOFF_S
    assert ejections.burden(P, now_s) == 0
    first, second = ejections.new_probe(), ejections.new_probe()
    ejections.begin((P, D, (P, D)), first, now_s)
    assert ejections.burden(P, now_s) == 1
    ejections.begin((P,), second, now_s)  # nobody else was left
    ejections.end((P,), second)
    assert ejections.burden(P, now_s) == 1
    ejections.end((P,), first)  # it was cancelled, and showed nothing
    assert ejections.burden(P, now_s) == 0


def test_the_back_off_doubles_up_to_a_bound_and_starts_anew_once_it_was_well_for_long() -> None:
    ejections, now_s, backoffs = Ejections(), 0.0, []
    fail(ejections, now_s, IN_A_ROW - 1)
    for _ in range(10):
        backoff_s = ejections.failed(P, now_s)
        assert backoff_s is not None
        backoffs.append(backoff_s)
        assert ejections.failed(P, now_s) is None  # a request that was placed before says nothing new
        now_s += backoff_s
    assert backoffs == [min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2**power) for power in range(10)]
    assert ejections.succeeded(P)
    fail(ejections, now_s, IN_A_ROW - 1)
    assert ejections.failed(P, now_s) == MAX_BACKOFF_S
    for _ in range(WINDOW):
        ejections.succeeded(P)
    fail(ejections, now_s, IN_A_ROW - 1)
    assert ejections.failed(P, now_s) == FIRST_BACKOFF_S


def test_a_hand_off_that_fails_counts_against_the_pair_and_against_whom_it_fails_with_several() -> None:
    ejections = Ejections()
    assert ejections.blamed_for_handoff(P, D) == ((P, D),)
    assert ejections.blamed_for_handoff(P, D) == ((P, D),)
    assert ejections.blamed_for_handoff(P, E) == ((P, E), P)
    assert ejections.blamed_for_handoff(Q, D) == ((Q, D), D)
    ejections.handed_off(Q, D)
    assert ejections.blamed_for_handoff(P, D) == ((P, D), P)
    ejections.handed_off(P, E)
    assert ejections.blamed_for_handoff(P, D) == ((P, D),)


def test_a_worker_that_is_gone_is_forgotten_with_its_pairs() -> None:
    ejections = Ejections()
    for subject in (P, D, (P, D), (P, E), (Q, D)):
        for _ in range(IN_A_ROW):
            ejections.failed(subject, 0.0)
    ejections.blamed_for_handoff(P, D)
    assert set(ejections.pair_burdens(0.0)) == {(P, D), (P, E), (Q, D)}
    ejections.forget(P)
    assert ejections.pair_burdens(0.0) == {(Q, D): 1}
    assert (ejections.burden(P, 0.0), ejections.burden(D, 0.0)) == (0, 1)
    assert ejections.blamed_for_handoff(Q, D) == ((Q, D),)


@pytest.mark.parametrize(("now_s", "words"), [(0.0, "set aside for 1 s"), (2.0, "set aside, to be probed")])
def test_it_says_for_how_long(now_s: float, words: str) -> None:
    ejections = Ejections()
    fail(ejections, 0.0)
    assert ejections.describe(P, now_s) == words
    assert ejections.describe(D, now_s) == ""


Event = tuple[float, bool]
"""When, and whether it was a success."""


def plain_model(events: Sequence[Event]) -> tuple[float | None, int]:
    """End of the back-off and level after `events`, from the words of the module alone: all of the past is kept."""
    until_s: float | None = None
    level, since = 0, list[bool]()
    for now_s, good in events:
        if good:
            since = [*([] if until_s is not None else since), True]
            until_s = None
            if len(since) >= WINDOW and all(since[-WINDOW:]):
                level, since = 0, []
            continue
        if until_s is not None and now_s < until_s:
            continue
        since.append(False)
        is_probe = until_s is not None
        if is_probe or (not any(since[-IN_A_ROW:]) and len(since) >= IN_A_ROW) or since[-WINDOW:].count(False) >= 8:
            level, since = level + 1, []
            until_s = now_s + min(60.0, 2.0 ** (level - 1))
    return until_s, level


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0, 10.0]), st.booleans() | st.just(True)), max_size=120))
def test_any_history_gives_what_a_plain_model_says(steps: list[tuple[float, bool]]) -> None:
    ejections, events, now_s = Ejections(), list[Event](), 0.0
    for pause_s, good in steps:
        now_s += pause_s
        events.append((now_s, good))
        if good:
            ejections.succeeded(P)
        else:
            ejections.failed(P, now_s)
        until_s, level = plain_model(events)
        assert ejections.burden(P, now_s) == (level if until_s is not None and now_s < until_s else 0)
        for later_s in (now_s + 0.75, now_s + 30.0):
            assert ejections.burden(P, later_s) == (level if until_s is not None and later_s < until_s else 0)
