"""Who is let in next: the bounded queue before the pool. Pure: no pool, no clock of its own.

    queued ─ pop_admissible ─▶ blocks RESERVED under a ticket (landing), or prompt computed here
       └─ discard ─▶ gone                released, failed, out of time, router lost

In rank order, without overtaking, so that a long prompt is not starved by short ones. The
first in line is let in once the pool has room for its tokens beside
  - what sequences already let in lack for the tokens they have (a preempted one lacks all), and
  - head-room for the growth of every sequence let in, which therefore grows with their number.

INVARIANT: no deadlock between reservations and running sequences. A reservation takes all its
blocks at once and never asks for more while it holds them, so it never waits for a sequence.
What it waits for (its hand-off, or its expiry) does not need free blocks here, and ends in
bounded time; then its blocks are free, or belong to a sequence, which can be preempted. So
what a running sequence waits for never waits for it. Checked by
`tests/unit/decode_worker/test_no_deadlock.py`: random arrivals and hand-offs that commit, fail
or stall, on a pool too small for them, until everybody has ended.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from decode_worker.arrival import Arrival
from decode_worker.scheduler import StepLimits
from tandem.errors import Overloaded

MAX_QUEUED = 1024
"""Reservations that may wait on one worker; routers queue before that."""


@dataclass(frozen=True, slots=True)
class Room:
    """What the pool and the batch hold at the moment."""

    free_blocks: int
    missing_blocks: int
    """Blocks that sequences already let in still lack for the tokens they have."""
    num_landing: int
    """Hand-offs under way."""
    num_seqs: int
    """Sequences that run or wait to run."""


class ReservationQueue:
    """Arrivals that hold nothing yet, in rank order."""

    def __init__(self, limits: StepLimits, max_queued: int = MAX_QUEUED) -> None:
        self._limits = limits
        self._max_queued = max_queued
        self._queue: list[Arrival] = []

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def num_tokens(self) -> int:
        """Tokens of all that wait."""
        return sum(len(arrival.spec.token_ids) for arrival in self._queue)

    def add(self, arrival: Arrival) -> None:
        """Puts it in line. Raises Overloaded if the line is full."""
        if len(self._queue) >= self._max_queued:
            raise Overloaded(f"{len(self._queue)} sequences already wait for KV blocks")
        bisect.insort(self._queue, arrival, key=lambda queued: queued.rank)

    def discard(self, arrival: Arrival) -> None:
        """Takes it out of the line, if it is there."""
        if arrival in self._queue:
            self._queue.remove(arrival)

    def pop_admissible(self, room: Room) -> Arrival | None:
        """Takes out the first in line if there is room for it now."""
        if not self._queue or not self._fits(self._queue[0], room):
            return None
        return self._queue.pop(0)

    def _fits(self, arrival: Arrival, room: Room) -> bool:
        num_active = room.num_landing + room.num_seqs + 1
        # Hand-offs take a while; a few are let in beyond the seats, so that no seat stays empty.
        seats = self._limits.max_seqs + max(1, self._limits.max_seqs // 4)
        needed = self._limits.blocks_for(len(arrival.spec.token_ids))
        headroom = self._limits.headroom_blocks(num_active)
        return num_active <= seats and room.free_blocks - room.missing_blocks >= needed + headroom
