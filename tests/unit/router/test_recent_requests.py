"""What the last requests and hand-offs were like."""

from __future__ import annotations

import pytest

from router.recent_requests import RecentRequests
from tandem.cluster_status import PLACEMENT_TEXTS, RecentActivity, SlowRequest
from tandem.types import KvRoute, PlacementReason, WorkerId
from tests.manual_clock import ManualClock

P, D = WorkerId("p"), WorkerId("d")
TCP = KvRoute("tcp", "shm: it is on another machine")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def recent(clock: ManualClock) -> RecentRequests:
    return RecentRequests(clock)


def request(total_s: float, name: str = "r") -> SlowRequest:
    return SlowRequest(name, "a" * 32, "stop", 0.0, total_s, 0.1, 10, 20, "p", "d")


def test_requests_are_counted_by_reason_and_those_on_two_workers_are_split(recent: RecentRequests) -> None:
    for reason in (PlacementReason.REMOTE_STATIC, PlacementReason.REMOTE_FASTER, PlacementReason.LOCAL_HELD, None):
        for _ in range(3 if reason is PlacementReason.LOCAL_HELD else 1):
            recent.ended(request(1.0), reason)
    counts = recent.placements()
    assert (counts[0].reason, counts[0].count) == ("local_held", 3)
    activity = RecentActivity(last_placements=counts)
    assert (activity.num_last, activity.num_split) == (6, 2)


def test_only_the_last_thousand_count(recent: RecentRequests) -> None:
    for _ in range(500):
        recent.ended(request(99.0), PlacementReason.LOCAL_SHORT)
    for _ in range(1000):
        recent.ended(request(1.0), PlacementReason.REMOTE_STATIC)
    assert [(each.reason, each.count) for each in recent.placements()] == [("remote_static", 1000)]
    assert recent.slowest()[0].total_s == 1.0


def test_every_reason_but_a_move_has_a_text() -> None:
    assert PLACEMENT_TEXTS.keys() == set(PlacementReason) - {PlacementReason.MOVED}


def test_the_slowest_come_first_and_say_how_long_ago_they_ended(recent: RecentRequests, clock: ManualClock) -> None:
    for number in range(20):
        recent.ended(request(number % 7 + number / 100, f"r{number}"), PlacementReason.LOCAL_SHORT)
        clock.advance_s(1)
    slow = recent.slowest()
    assert len(slow) == 10
    assert [each.request_id for each in slow[:3]] == ["r13", "r6", "r19"]
    assert slow[0].age_s == 7.0


def test_hand_offs_are_counted_by_pair(recent: RecentRequests) -> None:
    for seconds in (0.1, 0.5, 0.2):
        recent.handed_over(P, D, 100, seconds, KvRoute("shm"))
    recent.handed_over(D, P, 7, 2.0, TCP)
    back, forth = recent.handoffs()
    assert (forth.source, forth.target, forth.count, forth.num_bytes, forth.median_s) == ("p", "d", 3, 300, 0.2)
    assert (back.transport, back.passed_over) == ("tcp", "shm: it is on another machine")


def test_pairs_that_went_long_ago_are_forgotten(recent: RecentRequests) -> None:
    for number in range(300):
        recent.handed_over(WorkerId(f"p{number:03}"), D, 1, 0.1, TCP)
        recent.handed_over(P, D, 1, 0.1, TCP)
    pairs = recent.handoffs()
    assert len(pairs) == 256
    assert pairs[0].source == "p"
    assert pairs[0].count == 300
