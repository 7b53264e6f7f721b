"""Ends requests whose answers stay in this router: too much of one, too much of all together, or for too long.

Counted is what workers have sent and the connection has not taken: it waits in the delivery, or a face is writing it. A
request that is ended releases all that it holds; its caller finds the reason when it reads again. Time is the clock
given; `sweep_if_due` must be called every now and then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from router.delivery import Delivery
from shell.clock import Clock
from tandem.errors import InvalidRequest, Overloaded, TandemError

_SWEEP_EVERY_S = 0.25
"""Each looks at every request; workers' heartbeats alone would bring hundreds a second."""
_MOST_SHARE = 1 / 4
"""Share of all bytes that a single request may have."""


@dataclass(slots=True, eq=False)
class _Watched:
    delivery: Delivery
    end: Callable[[TandemError], None]
    num_outputs: int
    moved_s: float
    """Time at which the reader was seen last to have taken another output, or to have none to write."""


class Unread:
    """Shared by all requests of a router."""

    def __init__(self, clock: Clock, max_bytes: int, max_s: float) -> None:
        self._clock = clock
        self._max_request_bytes = int(max_bytes * _MOST_SHARE)
        self._max_bytes = max_bytes
        self._max_s = max_s
        self._watched: set[_Watched] = set()
        self._due_s = 0.0

    @contextmanager
    def watching(self, delivery: Delivery, end: Callable[[TandemError], None]) -> Iterator[None]:
        """While inside, `end` may be called, once, with the reason."""
        watched = _Watched(delivery, end, 0, self._clock.now_s())
        self._watched.add(watched)
        try:
            yield
        finally:
            self._watched.discard(watched)

    def sweep_if_due(self) -> None:
        """Sweeps, unless that was done a moment ago."""
        now_s = self._clock.now_s()
        if now_s >= self._due_s:
            self._due_s = now_s + _SWEEP_EVERY_S
            self.sweep()

    def sweep(self) -> None:
        """Ends the requests that are over a bound."""
        now_s = self._clock.now_s()
        left: list[tuple[int, _Watched]] = []
        for watched in tuple(self._watched):
            delivery = watched.delivery
            if not delivery.being_written or delivery.num_outputs != watched.num_outputs:
                watched.num_outputs, watched.moved_s = delivery.num_outputs, now_s
            elif now_s - watched.moved_s > self._max_s:
                self._end(watched, f"its answer was not read for {self._max_s:g} s")
                continue
            unread_bytes = delivery.unread_bytes
            if unread_bytes > self._max_request_bytes and delivery.is_gathered:
                self._end_too_large(watched)
            elif unread_bytes > self._max_request_bytes:
                self._end(watched, f"more than {self._max_request_bytes} bytes of its answer are not read")
            else:
                left.append((unread_bytes, watched))
        total = sum(unread_bytes for unread_bytes, _ in left)
        if total > self._max_bytes:
            left.sort(key=lambda each: each[0])
        while total > self._max_bytes:
            unread_bytes, largest = left.pop()
            total -= unread_bytes
            self._end(largest, f"more than {self._max_bytes} bytes of answers are not read, of which it has the most")

    def _end(self, watched: _Watched, why: str) -> None:
        self._tell(watched, Overloaded(f"the request was ended: {why}"))

    def _end_too_large(self, watched: _Watched) -> None:
        """Refuses a whole answer in a way that is not retried: it would be no smaller the next time."""
        most = self._max_request_bytes
        self._tell(
            watched, InvalidRequest("sampling", f"the whole answer takes more than {most} bytes: ask for a stream")
        )

    def _tell(self, watched: _Watched, error: TandemError) -> None:
        if watched in self._watched:
            self._watched.remove(watched)
            watched.end(error)
