"""Which request is admitted next: the bounded queue before the pool. Changes no pool, knows no clock.

    queued ─ pop_admissible ─▶ blocks RESERVED under a ticket (incoming transfer), or prompt computed here
       └─ discard ─▶ gone                released, failed, out of time, router lost

In rank order, without overtaking, so that a long prompt is not starved by short ones. The
first in line is admitted once the pool has room for its tokens beside
  - what requests already admitted lack for the tokens they have (a preempted one lacks all), and
  - head-room for the growth of every sequence admitted, which therefore grows with their number.

INVARIANT: no deadlock between reservations and running requests. A reservation takes all its
blocks at once and never asks for more while it holds them, so it never waits for a request.
What it waits for (its hand-off, or its expiry) does not need free blocks here, and ends in
bounded time; then its blocks are free, or belong to a request, which can be preempted. So
what a running request waits for never waits for it. Checked by
`tests/unit/decode_worker/test_no_deadlock.py`: random arrivals and hand-offs that commit, fail
or stall, on a pool too small for them, until everybody has ended.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

from decode_worker.scheduler import StepLimits
from engine.block_pool import BlockPool
from tandem.errors import Overloaded
from worker.request import Request

MAX_QUEUED = 1024
"""Reservations that may wait on one worker; routers queue before that."""


@dataclass(frozen=True, slots=True)
class Room:
    """What the pool and the batch hold at the moment."""

    spare_blocks: int
    """Free blocks, less those that requests already admitted still lack for the tokens they have."""
    num_seqs: int
    """Sequences that run, wait to run, or are under way as hand-offs."""


class ReservationQueue:
    """Requests that hold nothing yet, in rank order."""

    def __init__(self, pool: BlockPool, limits: StepLimits, max_queued: int = MAX_QUEUED) -> None:
        self._pool = pool
        self._limits = limits
        self._max_queued = max_queued
        self._queue: list[Request] = []

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)

    @property
    def num_seqs(self) -> int:
        """Sequences of all that wait."""
        return sum(request.group.num_seats for request in self._queue)

    @property
    def num_tokens(self) -> int:
        """Tokens to compute of all that wait."""
        return sum(request.group.num_remaining_tokens for request in self._queue)

    def add(self, request: Request) -> None:
        """Puts it in line. Raises Overloaded if the line is full."""
        if len(self._queue) >= self._max_queued:
            raise Overloaded(f"{len(self._queue)} requests already wait for KV blocks")
        bisect.insort(self._queue, request, key=lambda queued: queued.rank)

    def discard(self, request: Request) -> None:
        """Takes it out of the line, if it is there."""
        if request in self._queue:
            self._queue.remove(request)

    def pop_admissible(self, room: Room) -> Request | None:
        """Takes out the first in line if there is room for it now."""
        if not self._queue or not self._fits(self._queue[0], room):
            return None
        return self._queue.pop(0)

    def _fits(self, request: Request, room: Room) -> bool:
        num_seqs = room.num_seqs + request.group.num_seats
        # Hand-offs take a while; a few are admitted beyond the seats, so that no seat stays empty.
        seats = self._limits.max_seqs + max(1, self._limits.max_seqs // 4)
        headroom = self._limits.headroom_blocks(num_seqs) if room.num_seqs else 0
        return num_seqs <= seats and room.spare_blocks >= request.group.num_missing_blocks(self._pool) + headroom
