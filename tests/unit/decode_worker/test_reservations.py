"""Which request is admitted, and when."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from decode_worker.reservations import ReservationQueue, Room
from decode_worker.scheduler import StepLimits
from engine.block_pool import BlockPool
from tandem.clock import Deadline
from tandem.errors import Overloaded
from tandem.telemetry.observers import SequenceObserver
from tandem.types import GroupSpec, Handle
from tests.manual_clock import ManualClock
from worker.request import Request

POOL = BlockPool(100, 4)
LIMITS = StepLimits(block_size=4, max_seqs=4, chunk_tokens=16, headroom_tokens=8)

MakeSpec = Callable[..., GroupSpec]


@pytest.fixture
def request_of(make_router: Callable[[], object]) -> Callable[[int, GroupSpec], Request]:
    def make(number: int, spec: GroupSpec) -> Request:
        deadline = Deadline.after(ManualClock(), None)
        return Request(make_router(), Handle(number), spec, number, 0.0, deadline, SequenceObserver())  # type: ignore[arg-type]

    return make


MakeRequest = Callable[[int, GroupSpec], Request]


@pytest.mark.parametrize(
    ("has", "lets_in"),
    [
        (Room(3, 0), True),  # alone: no head-room
        (Room(2, 0), False),
        (Room(7, 1), True),  # 3 for itself, 2 for the growth of each of two
        (Room(6, 1), False),
        (Room(9, 2), True),
        (Room(8, 2), False),
        (Room(99, 4), True),  # one beyond the seats, to be there when one becomes free
        (Room(99, 5), False),
    ],
)
def test_room_is_needed_for_its_tokens_and_for_everybodys_growth(
    make_spec: MakeSpec, request_of: MakeRequest, has: Room, lets_in: bool
) -> None:
    queue = ReservationQueue(POOL, LIMITS)
    queue.add(request_of(1, make_spec(12, 5)))
    assert (queue.pop_admissible(has) is not None) == lets_in
    assert len(queue) == (0 if lets_in else 1)


@pytest.mark.parametrize(
    ("has", "lets_in"),
    [
        (Room(5, 0), True),  # 2 full blocks shared, the last one copied for each choice
        (Room(4, 0), False),
        (Room(13, 1), True),  # and 2 for the growth of each of four
        (Room(12, 1), False),
        (Room(99, 3), False),  # three more would be two beyond the seats
    ],
)
def test_a_group_needs_room_for_all_its_choices(
    make_spec: MakeSpec, request_of: MakeRequest, has: Room, lets_in: bool
) -> None:
    queue = ReservationQueue(POOL, LIMITS)
    queue.add(request_of(1, make_spec(11, 5, n=3)))
    assert queue.num_seqs == 3
    assert (queue.pop_admissible(has) is not None) == lets_in


def test_nobody_overtakes_the_first_in_line(make_spec: MakeSpec, request_of: MakeRequest) -> None:
    queue = ReservationQueue(POOL, LIMITS)
    queue.add(request_of(1, make_spec(100, 5)))
    queue.add(request_of(2, make_spec(1, 5)))
    assert queue.pop_admissible(Room(20, 0)) is None


def test_the_line_is_bounded_and_counts_its_tokens(make_spec: MakeSpec, request_of: MakeRequest) -> None:
    queue = ReservationQueue(POOL, LIMITS, max_queued=2)
    first, second = request_of(1, make_spec(100, 5)), request_of(2, make_spec(7, 5))
    queue.add(first)
    queue.add(second)
    with pytest.raises(Overloaded):
        queue.add(request_of(3, make_spec(1, 1)))
    queue.discard(first)
    queue.discard(first)
    assert (len(queue), queue.num_tokens) == (1, 7)
