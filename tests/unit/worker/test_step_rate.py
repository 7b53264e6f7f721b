"""Steps per second, right from the first second."""

from __future__ import annotations

import pytest

from worker.step_rate import SPAN_S, StepRate


def test_the_first_second_counts_from_the_start() -> None:
    rate = StepRate()
    assert rate.look(0, 10.0) == 0.0
    assert rate.look(20, 10.5) == 40.0
    assert rate.look(40, 11.0) == 40.0


def test_what_is_older_than_the_span_no_longer_counts() -> None:
    rate = StepRate()
    for tenth in range(100):
        rate.look(1000, 10 + tenth / 10)
    for tenth in range(100, 200):
        last = rate.look(1000 + 5 * (tenth - 99), 10 + tenth / 10)
    assert last == pytest.approx(50.0)
    assert rate.look(1500, 29.9 + 2 * SPAN_S) == 0.0
