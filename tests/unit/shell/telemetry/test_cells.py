"""Counters and histograms of our own."""

from __future__ import annotations

import math

import pytest

from shell.telemetry.metrics import Cells, Counter


def test_a_counter_stands_at_zero_where_it_was_told_to_and_counts_by_labels() -> None:
    counter = Counter({("a",): 0.0})
    counter.add(2, "b")
    counter.add(3, "b")
    assert counter == {("a",): 0, ("b",): 5}


def test_a_value_on_a_bound_does_not_exceed_it() -> None:
    cells = Cells((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        cells.observe(value)
    assert list(cells.cumulative((1.0, 2.0))) == [(1.0, 2), (2.0, 4), (math.inf, 5)]
    assert cells.sum == 14.0


def test_an_observation_can_count_several_times() -> None:
    cells = Cells((1.0,))
    cells.observe(0.25, times=4)
    assert (list(cells.cumulative((1.0,))), cells.sum) == ([(1.0, 4), (math.inf, 4)], 1.0)


@pytest.mark.parametrize("shown", [(), (0.1,), (0.1, 0.3), (0.2, 0.4), (0.1, 0.2, 0.3, 0.4)])
def test_fewer_bounds_show_the_same_observations(shown: tuple[float, ...]) -> None:
    values = (0.05, 0.1, 0.15, 0.25, 0.35, 0.4, 7.0)
    fine = Cells((0.1, 0.2, 0.3, 0.4))
    for value in values:
        fine.observe(value)
    expected = [(bound, sum(value <= bound for value in values)) for bound in (*shown, math.inf)]
    assert list(fine.cumulative(shown)) == expected


def test_a_bucket_shows_the_latest_trace_that_was_met_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((1.0, 2.0, 3.0))
    monkeypatch.setattr("shell.telemetry.metrics.time.time", lambda: next(times))
    cells = Cells((0.1, 0.2, 0.3))
    cells.observe(0.15, trace_id="a")
    cells.observe(0.05, trace_id="b")
    cells.observe(0.15)
    cells.observe(9.0, trace_id="c")

    def shown(*bounds: float) -> list[str | None]:
        return [each and each.labels["trace_id"] for each in cells.exemplars(bounds)]

    assert shown(0.1, 0.2, 0.3) == ["b", "a", None, "c"]
    assert shown(0.2) == ["b", "c"]
    assert shown() == ["c"]
