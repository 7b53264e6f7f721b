"""Who is let in, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from decode_worker.arrival import Arrival
from decode_worker.reservations import ReservationQueue, Room
from decode_worker.scheduler import StepLimits
from tandem.clock import Deadline, ManualClock
from tandem.errors import Overloaded, TandemError
from tandem.telemetry.observers_silent import SilentSequence
from tandem.types import Handle, SequenceSpec, TokenDelta

LIMITS = StepLimits(block_size=4, max_seqs=4, chunk_tokens=16, headroom_tokens=8)

MakeSpec = Callable[..., SequenceSpec]


class Silent:
    """A router that nobody listens to."""

    def reserved(self, handle: Handle, ticket: bytes, kv_endpoint: bytes) -> None: ...

    def prefill_done(self, handle: Handle, delta: TokenDelta, queue_s: float, prefill_s: float) -> None: ...

    def deltas(self, deltas: Iterable[tuple[Handle, TokenDelta]]) -> None: ...

    def failed(self, handle: Handle, error: TandemError) -> None: ...


def arrival(number: int, spec: SequenceSpec) -> Arrival:
    deadline = Deadline.after(ManualClock(), None)
    return Arrival(Silent(), Handle(number), spec, False, number, 0.0, deadline, SilentSequence())


def room(free_blocks: int, missing_blocks: int = 0, num_landing: int = 0, num_seqs: int = 0) -> Room:
    return Room(free_blocks, missing_blocks, num_landing, num_seqs)


@pytest.mark.parametrize(
    ("has", "lets_in"),
    [
        (room(3), True),  # alone: no head-room
        (room(2), False),
        (room(7, num_seqs=1), True),  # 3 for itself, 2 for the growth of each of two
        (room(6, num_seqs=1), False),
        (room(9, num_seqs=1, num_landing=1), True),
        (room(8, num_seqs=1, num_landing=1), False),
        (room(9, missing_blocks=2, num_seqs=1), True),  # a preempted one gets its blocks back first
        (room(8, missing_blocks=2, num_seqs=1), False),
        (room(99, num_seqs=4), True),  # one beyond the seats, to be there when one becomes free
        (room(99, num_seqs=4, num_landing=1), False),
    ],
)
def test_room_is_needed_for_its_tokens_and_for_everybodys_growth(make_spec: MakeSpec, has: Room, lets_in: bool) -> None:
    queue = ReservationQueue(LIMITS)
    queue.add(arrival(1, make_spec(12, 5)))
    assert (queue.pop_admissible(has) is not None) == lets_in
    assert len(queue) == (0 if lets_in else 1)


def test_nobody_overtakes_the_first_in_line(make_spec: MakeSpec) -> None:
    queue = ReservationQueue(LIMITS)
    queue.add(arrival(1, make_spec(100, 5)))
    queue.add(arrival(2, make_spec(1, 5)))
    assert queue.pop_admissible(room(20)) is None


def test_the_line_is_bounded_and_counts_its_tokens(make_spec: MakeSpec) -> None:
    queue = ReservationQueue(LIMITS, max_queued=2)
    first, second = arrival(1, make_spec(100, 5)), arrival(2, make_spec(7, 5))
    queue.add(first)
    queue.add(second)
    with pytest.raises(Overloaded):
        queue.add(arrival(3, make_spec(1, 1)))
    queue.discard(first)
    queue.discard(first)
    assert (len(queue), queue.num_tokens) == (1, 7)
