"""What is learned from hand-offs that land."""

from __future__ import annotations

from typing import Any

from decode_worker.handoff_pace import HandoffPace


def test_ends_and_steps_during_handoffs_are_averaged() -> None:
    pace, first, second = HandoffPace(most_ends=100, first_guess_steps=256), _request(), _request()
    pace.started(first, 10)
    pace.ended(3)
    pace.started(second, 20)
    pace.ended(5)
    pace.landed(first, 50)
    assert (pace.num_ends, pace.num_steps) == (1.0, 40.0), "the first one replaces the guess of steps"
    pace.landed(second, 44)
    assert (pace.num_ends, pace.num_steps) == (1.0 + (5 - 1.0) / 8, 40.0 + (24 - 40.0) / 8)


def test_a_stalled_handoff_counts_for_no_more_than_the_bound() -> None:
    pace, stalled = HandoffPace(most_ends=16, first_guess_steps=256), _request()
    pace.started(stalled, 0)
    pace.ended(100_000)
    pace.landed(stalled, 9)
    assert pace.num_ends == 2.0


def test_steps_are_not_learned_where_no_sequence_runs() -> None:
    pace, idle, gone = HandoffPace(most_ends=16, first_guess_steps=256), _request(), _request()
    pace.started(idle, None)
    pace.landed(idle, 3)
    pace.started(gone, 5)
    pace.forget(gone)
    pace.forget(gone)
    assert pace.num_steps == 256.0


def _request() -> Any:
    return object()
