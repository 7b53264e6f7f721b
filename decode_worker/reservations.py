"""Which request is admitted next: the bounded queue before the pool. Changes no pool, knows no clock.

    queued ─ pop_admissible ─▶ blocks RESERVED under a ticket (incoming transfer), or prompt computed here
       └─ discard ─▶ gone                released, failed, out of time, router lost

The first in rank that fits is admitted. It fits if the pool has room for its tokens and its expected growth beside
that of all who were admitted (`growth`), and if the sequences under way are no more than can soon be seated.
One that does not fit is overtaken by those that do, at most `max_overtakes` times; then nobody behind it is admitted
before it. But nobody waits for one that could not be admitted at all before blocks leave quarantine.

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

from decode_worker.growth import Forecast, Growth
from engine.prefix_cache import PrefixCache
from tandem.errors import Overloaded
from worker.request import Request

MAX_QUEUED = 1024
"""Reservations that may wait on one worker; routers queue before that."""
MAX_OVERTAKES = 64
"""Later requests that may be admitted before an earlier one."""
LOOK_AHEAD = 32
"""Of so many in line is one looked for that fits: they are looked at in every step."""


@dataclass(frozen=True, slots=True)
class Room:
    """What is left for newcomers at the moment."""

    free_blocks: int
    """Blocks that can be handed out now: free ones, and known ones that nobody holds."""
    most_blocks: int
    """The same once all requests have ended: all blocks that are not in quarantine."""
    seats: int
    """Sequences that may be added to those that run, wait to run, or are under way as hand-offs."""
    forecast: Forecast | None
    """Of blocks that all these are expected to take; None = there are none, and growth finds the whole pool free."""
    handoff_steps: int
    """Steps that a hand-off is expected to take."""


class ReservationQueue:
    """Requests that hold nothing yet, in rank order."""

    def __init__(
        self, cache: PrefixCache, growth: Growth, max_queued: int = MAX_QUEUED, max_overtakes: int = MAX_OVERTAKES
    ) -> None:
        self._cache = cache
        self._pool = cache.pool
        self._growth = growth
        self._max_queued = max_queued
        self._max_overtakes = max_overtakes
        self._queue: list[Request] = []
        self._overtaken: dict[Request, int] = {}
        """How many later ones were admitted before each; those that were not overtaken are left out."""

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)

    @property
    def num_seqs(self) -> int:
        """Sequences of all that wait."""
        return sum(request.group.num_seats for request in self._queue)

    def num_tokens(self, *, computed_elsewhere: bool) -> int:
        """Tokens of all that wait, with or without those of prompts that are computed elsewhere."""
        return sum(
            request.group.num_remaining_tokens
            for request in self._queue
            if computed_elsewhere or request.owes_prefill_done
        )

    @property
    def is_overdue(self) -> bool:
        """Whether the first in line was overtaken often enough."""
        return bool(self._queue) and self._overtaken.get(self._queue[0], 0) >= self._max_overtakes

    def was_overtaken(self) -> None:
        """A prompt for another worker has taken room before all that wait here."""
        for request in self._queue:
            self._overtaken[request] = self._overtaken.get(request, 0) + 1

    def add(self, request: Request) -> None:
        """Puts it in line. Raises Overloaded if the line is full."""
        if len(self._queue) >= self._max_queued:
            raise Overloaded(f"{len(self._queue)} requests already wait for KV blocks")
        bisect.insort(self._queue, request, key=lambda queued: queued.rank)

    def discard(self, request: Request) -> None:
        """Takes it out of the line, if it is there."""
        if request in self._queue:
            self._queue.remove(request)
            self._overtaken.pop(request, None)

    def pop_admissible(self, room: Room) -> Request | None:
        """Takes out the first in line that fits now, unless one before it was overtaken often enough."""
        for place, request in enumerate(self._queue[:LOOK_AHEAD]):
            if self._fits(request, room) or (place == 0 and self._fits(request, room, self._num_held(request))):
                self._note_overtaken(request)
                self.discard(request)
                return request
            if self._overtaken.get(request, 0) >= self._max_overtakes and self._could_fit(request, room):
                return None
        return None

    def _num_held(self, request: Request) -> int:
        """Blocks that others hold and that it will share. Looked for only of the first in line: that takes time.

        One that is to be computed here finds its blocks later, and competes for room without them.
        """
        if request.owes_prefill_done:
            return 0
        return self._cache.num_held(request.spec.cache_salt, request.group.prefix.token_ids)

    def _fits(self, request: Request, room: Room, num_held: int = 0) -> bool:
        group, free_blocks = request.group, room.free_blocks + num_held
        if room.forecast is None:
            return group.num_missing_blocks(self._pool) <= free_blocks
        delay_steps = 0 if request.owes_prefill_done else room.handoff_steps
        wanted = self._growth.blocks_wanted(group, room.forecast, delay_steps)
        return group.num_seats <= room.seats and wanted <= free_blocks

    def _could_fit(self, request: Request, room: Room) -> bool:
        return request.group.num_missing_blocks(self._pool) <= room.most_blocks

    def _note_overtaken(self, request: Request) -> None:
        for earlier in self._queue[: self._queue.index(request)]:
            self._overtaken[earlier] = self._overtaken.get(earlier, 0) + 1
