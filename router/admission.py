"""Lets a bounded number of requests run, and a bounded number wait.

Waiting requests go by priority, then by arrival. One that would wait beyond its own deadline is
refused at once. `AdmissionQueue` is pure; `Admission` lets coroutines wait in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from router.tuning import DEPARTURE_WEIGHT
from shell.clock import Clock, Deadline
from tandem.errors import Overloaded

_RETRY_AFTER_BOUNDS_S = (0.1, 60.0)


@dataclass(slots=True, eq=False)
class Entry:
    """A request that asks to run. Identity is its key."""

    num_tokens: int
    priority: int = 0
    turn: asyncio.Future[None] | None = field(default=None)
    """Resolved on admission, where somebody waits."""


class AdmissionQueue:
    """Who runs and who waits. Single-threaded; no clock but the times given."""

    def __init__(self, max_active: int, max_queued: int, max_queued_tokens: int) -> None:
        self.max_active = max_active
        """Requests that may run; after a change, call `next` until there is none."""
        self._max_queued = max_queued
        self._max_queued_tokens = max_queued_tokens
        self._by_priority: dict[int, dict[Entry, None]] = {}
        self.num_active = 0
        """Requests that run."""
        self.num_queued = 0
        """Requests that wait."""
        self.queued_tokens = 0
        """Prompt tokens of waiting requests."""
        self._interval_s: float | None = None
        self._last_departure_s: float | None = None

    def check_room(self, priority: int, num_coming: int = 0) -> None:
        """Raises Overloaded if not one more request may wait, or run, once `num_coming` others have entered."""
        free = max(0, self.max_active - self.num_active) + self._max_queued - self.num_queued
        if free <= num_coming:
            wait_s = self.expected_wait_s(priority)
            raise Overloaded(f"{self.num_queued + num_coming} requests wait already", _retry_after_s(wait_s))

    def enter(self, entry: Entry, remaining_s: float | None) -> bool:
        """True: it runs. False: it waits. Raises Overloaded if it can do neither in `remaining_s`."""
        if self.num_active < self.max_active and not self.num_queued:
            self.num_active += 1
            return True
        self.check_room(entry.priority)
        wait_s = self.expected_wait_s(entry.priority)
        # An empty queue takes a prompt of any size: else a large one could never wait.
        if self.num_queued and self.queued_tokens + entry.num_tokens > self._max_queued_tokens:
            raise Overloaded(f"{self.queued_tokens} prompt tokens wait already", _retry_after_s(wait_s))
        if remaining_s is not None and wait_s > remaining_s:
            raise Overloaded(
                f"the wait of about {wait_s:.1f} s exceeds the deadline in {remaining_s:.1f} s", _retry_after_s(wait_s)
            )
        self._by_priority.setdefault(entry.priority, {})[entry] = None
        self.num_queued += 1
        self.queued_tokens += entry.num_tokens
        return False

    def withdraw(self, entry: Entry) -> bool:
        """Takes a waiting request out; False if it does not wait any more."""
        waiting = self._by_priority.get(entry.priority, {})
        if entry not in waiting:
            return False
        del waiting[entry]
        if not waiting:
            del self._by_priority[entry.priority]
        self.num_queued -= 1
        self.queued_tokens -= entry.num_tokens
        return True

    def depart(self, now_s: float) -> Entry | None:
        """A running request ended; returns the one that runs in its place, if any waits."""
        self._measure(now_s)
        self.num_active -= 1
        if not self.num_queued:
            # Else an old slow pace would refuse the requests that are needed to measure a new one.
            self._interval_s = None
        return self.next()

    def next(self) -> Entry | None:
        """Returns the waiting request that runs from now on, if one waits and may run."""
        if not self.num_queued or self.num_active >= self.max_active:
            return None
        entry = next(iter(self._by_priority[max(self._by_priority)]))
        self.withdraw(entry)
        self.num_active += 1
        return entry

    def expected_wait_s(self, priority: int) -> float:
        """How long a newcomer of this priority would wait, by the recent pace; 0 if unknown."""
        if self._interval_s is None:
            return 0.0
        ahead = sum(len(waiting) for level, waiting in self._by_priority.items() if level >= priority)
        return (ahead + 1) * self._interval_s

    def _measure(self, now_s: float) -> None:
        """Intervals count only while all places are taken: then they are the pace of service."""
        if self._last_departure_s is not None and self.num_active >= self.max_active:
            interval_s = now_s - self._last_departure_s
            known_s = interval_s if self._interval_s is None else self._interval_s
            self._interval_s = known_s + DEPARTURE_WEIGHT * (interval_s - known_s)
        self._last_departure_s = now_s if self.num_queued else None


class Admission:
    """Lets coroutines wait in `queue`."""

    def __init__(self, queue: AdmissionQueue, clock: Clock) -> None:
        self.queue = queue
        self._clock = clock

    @asynccontextmanager
    async def slot(self, num_tokens: int, priority: int, deadline: Deadline) -> AsyncIterator[None]:
        """Holds one place while inside. Raises Overloaded; the caller's own timeout ends the wait."""
        entry = Entry(num_tokens, priority)
        if not self.queue.enter(entry, deadline.remaining_s()):
            await self._wait(entry)
        try:
            yield
        finally:
            self._depart()

    async def _wait(self, entry: Entry) -> None:
        entry.turn = asyncio.get_running_loop().create_future()
        try:
            await entry.turn
        except asyncio.CancelledError:
            # The turn may have come in the same moment; then the place must be passed on.
            if not self.queue.withdraw(entry):
                self._depart()
            raise

    def resize(self, max_active: int) -> None:
        """Lets `max_active` requests run; running requests go on."""
        self.queue.max_active = max_active
        while (entry := self.queue.next()) is not None:
            self._begin(entry)

    def _depart(self) -> None:
        entry = self.queue.depart(self._clock.now_s())
        if entry is not None:
            self._begin(entry)

    @staticmethod
    def _begin(entry: Entry) -> None:
        # A cancelled waiter that was still given the place passes it on in `_wait`.
        if entry.turn is not None and not entry.turn.done():
            entry.turn.set_result(None)


def _retry_after_s(wait_s: float) -> float:
    low_s, high_s = _RETRY_AFTER_BOUNDS_S
    return min(high_s, max(low_s, wait_s))
