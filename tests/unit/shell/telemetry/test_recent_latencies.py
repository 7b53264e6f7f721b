"""Latencies and rates of the last minute."""

from __future__ import annotations

import pytest

from shell.telemetry.recent_latencies import RecentLatencies
from tandem.cluster_status import LatencySummary
from tests.manual_clock import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    """At a point where a slot begins."""
    return ManualClock(1000.0)


@pytest.fixture
def recent(clock: ManualClock) -> RecentLatencies:
    """Of a process that has just begun."""
    return RecentLatencies(clock)


def named(recent: RecentLatencies, name: str) -> LatencySummary:
    """The one summary of this name."""
    (summary,) = [each for each in recent.activity().latencies if each.name == name]
    return summary


def test_nothing_seen_gives_zeros(recent: RecentLatencies) -> None:
    assert recent.activity().latencies == (
        LatencySummary("time_to_first_token", 0, 0.0, 0.0, 0.0),
        LatencySummary("inter_token", 0, 0.0, 0.0, 0.0),
        LatencySummary("end_to_end", 0, 0.0, 0.0, 0.0),
    )
    assert recent.activity().requests_per_s == recent.activity().tokens_per_s == 0.0


def test_quantiles_lie_within_a_twentieth_of_the_truth(recent: RecentLatencies) -> None:
    for milliseconds in range(1, 1001):
        recent.first_token(milliseconds / 1000)
    summary = named(recent, "time_to_first_token")
    assert summary.count == 1000
    assert summary.p50_s == pytest.approx(0.5, rel=0.05)
    assert summary.p90_s == pytest.approx(0.9, rel=0.05)
    assert summary.p99_s == pytest.approx(0.99, rel=0.05)


def test_tokens_that_came_together_count_each(recent: RecentLatencies) -> None:
    recent.inter_token(0.010, 99)
    recent.inter_token(1.0, 1)
    summary = named(recent, "inter_token")
    assert summary.count == 100
    assert summary.p99_s == pytest.approx(0.010, rel=0.05)


@pytest.mark.parametrize(("seconds", "told_s"), [(0.0, 1e-4), (1e9, 1528.0)])
def test_latencies_out_of_range_count_as_the_nearest(recent: RecentLatencies, seconds: float, told_s: float) -> None:
    recent.finished(seconds)
    assert named(recent, "end_to_end").p50_s == pytest.approx(told_s, rel=0.01)


def test_what_is_older_than_the_window_is_forgotten(recent: RecentLatencies, clock: ManualClock) -> None:
    recent.finished(5.0)
    clock.advance_s(30)
    recent.finished(1.0)
    clock.advance_s(29.9)
    assert named(recent, "end_to_end").count == 2
    clock.advance_s(0.1)
    assert named(recent, "end_to_end").count == 1
    clock.advance_s(30)
    assert named(recent, "end_to_end").count == 0


def test_rates_of_a_young_process_count_from_its_start(recent: RecentLatencies, clock: ManualClock) -> None:
    clock.advance_s(10)
    recent.first_token(0.1)
    recent.inter_token(0.01, 39)
    recent.finished(0.5)
    recent.broken_off()
    rates = recent.activity()
    assert (rates.window_s, rates.requests_per_s, rates.tokens_per_s) == (10.0, 0.2, 4.0)


def test_a_request_that_broke_off_has_no_end_to_end_latency(recent: RecentLatencies) -> None:
    recent.broken_off()
    assert named(recent, "end_to_end").count == 0
    assert recent.activity().requests_per_s > 0


def test_rates_of_an_old_process_count_the_window(recent: RecentLatencies, clock: ManualClock) -> None:
    clock.advance_s(3600)
    recent.inter_token(0.01, 550)
    clock.advance_s(2)
    assert 55 <= recent.activity().window_s <= 60
    assert recent.activity().tokens_per_s == pytest.approx(550 / recent.activity().window_s)


def test_totals_count_from_the_start(recent: RecentLatencies, clock: ManualClock) -> None:
    recent.first_token(0.1)
    recent.inter_token(0.01, 39)
    recent.finished(0.5)
    clock.advance_s(3600)
    recent.broken_off()
    assert (recent.activity().total_requests, recent.activity().total_tokens) == (2, 40)
