"""Which request is admitted, and when."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from decode_worker.growth import Forecast, Growth
from decode_worker.reservations import LOOK_AHEAD, ReservationQueue, Room
from engine.block_pool import BlockPool
from engine.prefix_cache import PrefixCache
from shell.clock import Deadline
from shell.telemetry.events import Events
from tandem.errors import Overloaded
from tandem.types import GroupSpec, Handle
from tests.manual_clock import ManualClock
from worker.request import Request

POOL = BlockPool(100, 4)

MakeSpec = Callable[..., GroupSpec]


@pytest.fixture
def request_of(make_router: Callable[[], object]) -> Callable[[int, GroupSpec], Request]:
    def make(number: int, spec: GroupSpec) -> Request:
        deadline = Deadline.after(ManualClock(), None)
        return Request(make_router(), Handle(number), spec, number, 0.0, deadline, Events())  # type: ignore[arg-type]

    return make


MakeRequest = Callable[[int, GroupSpec], Request]


def room(free_blocks: int, *, is_alone: bool = True, seats: int = 9, taken: int = 0, most_blocks: int = 100) -> Room:
    """`taken`: blocks that others are expected to take."""
    forecast = None if is_alone else Forecast(POOL.block_size, taken, [])
    return Room(free_blocks, most_blocks, seats, forecast, handoff_steps=20)


@pytest.mark.parametrize(
    ("has", "lets_in"),
    [
        (room(3), True),  # alone: its growth finds the whole pool
        (room(2), False),
        (room(5, is_alone=False), True),  # 3 for its tokens, 2 for its growth
        (room(4, is_alone=False), False),
        (room(15, is_alone=False, taken=10), True),
        (room(14, is_alone=False, taken=10), False),
        (room(99, is_alone=False, seats=1), True),
        (room(99, is_alone=False, seats=0), False),
    ],
)
def test_room_is_needed_for_its_tokens_and_for_everybodys_growth(
    make_spec: MakeSpec, request_of: MakeRequest, has: Room, lets_in: bool
) -> None:
    queue = ReservationQueue(PrefixCache(POOL), Growth(POOL))
    queue.add(request_of(1, make_spec(12, 5)))
    assert (queue.pop_admissible(has) is not None) == lets_in
    assert len(queue) == (0 if lets_in else 1)


@pytest.mark.parametrize(
    ("has", "lets_in"),
    [
        (room(5), True),  # 2 full blocks shared, the last one copied for each choice
        (room(4), False),
        (room(11, is_alone=False), True),  # and 2 for the growth of each
        (room(10, is_alone=False), False),
        (room(99, is_alone=False, seats=2), False),
    ],
)
def test_a_group_needs_room_for_all_its_choices(
    make_spec: MakeSpec, request_of: MakeRequest, has: Room, lets_in: bool
) -> None:
    queue = ReservationQueue(PrefixCache(POOL), Growth(POOL))
    queue.add(request_of(1, make_spec(11, 5, n=3)))
    assert queue.num_seqs == 3
    assert (queue.pop_admissible(has) is not None) == lets_in


def test_one_that_does_not_fit_is_overtaken_a_bounded_number_of_times(
    make_spec: MakeSpec, request_of: MakeRequest
) -> None:
    queue = ReservationQueue(PrefixCache(POOL), Growth(POOL), max_overtakes=3)
    large = request_of(1, make_spec(100, 5))
    small = [request_of(2 + number, make_spec(1, 5)) for number in range(4)]
    for request in (large, *small):
        queue.add(request)
    assert [queue.pop_admissible(room(20)) for _ in small] == [*small[:-1], None]
    assert queue.pop_admissible(room(25)) is large
    assert queue.pop_admissible(room(20)) is small[-1]


def test_nobody_waits_for_one_that_cannot_fit_before_blocks_leave_quarantine(
    make_spec: MakeSpec, request_of: MakeRequest
) -> None:
    queue = ReservationQueue(PrefixCache(POOL), Growth(POOL), max_overtakes=3)
    queue.add(request_of(1, make_spec(100, 5)))
    for number in range(5):
        small = request_of(2 + number, make_spec(1, 5))
        queue.add(small)
        assert queue.pop_admissible(room(20, most_blocks=24)) is small
    queue.add(request_of(999, make_spec(1, 5)))
    assert queue.pop_admissible(room(20, most_blocks=25)) is None, "now it is waited for"


def test_only_the_first_in_line_are_looked_at(make_spec: MakeSpec, request_of: MakeRequest) -> None:
    queue = ReservationQueue(PrefixCache(POOL), Growth(POOL))
    for number in range(LOOK_AHEAD):
        queue.add(request_of(number, make_spec(100, 5)))
    queue.add(request_of(LOOK_AHEAD, make_spec(1, 5)))
    assert queue.pop_admissible(room(20)) is None


def test_the_line_is_bounded_and_counts_its_tokens(make_spec: MakeSpec, request_of: MakeRequest) -> None:
    queue = ReservationQueue(PrefixCache(POOL), Growth(POOL), max_queued=2)
    first, second = request_of(1, make_spec(100, 5)), request_of(2, make_spec(7, 5))
    queue.add(first)
    queue.add(second)
    with pytest.raises(Overloaded):
        queue.add(request_of(3, make_spec(1, 1)))
    queue.discard(first)
    queue.discard(first)
    assert (len(queue), queue.num_tokens(computed_elsewhere=True)) == (1, 7)
