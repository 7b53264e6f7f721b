"""Requests that Abort can end, by the ids that their callers chose. An id may run more than once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from router.entrance import RunningRequest
from router.outbox import Outbox
from tandem.errors import TandemError


class RequestAborted(TandemError):
    """Somebody ended the request by its id; its own caller is answered, not refused."""


class Aborts:
    """Single-threaded."""

    def __init__(self) -> None:
        self._outboxes: dict[str, list[Outbox]] = {}

    @contextmanager
    def listed(self, running: RunningRequest) -> Iterator[None]:
        """While inside, `abort` lets the request's outbox end with RequestAborted."""
        outboxes = self._outboxes.setdefault(running.request_id, [])
        outboxes.append(running.outbox)
        try:
            yield
        finally:
            outboxes.remove(running.outbox)
            if not outboxes:
                self._outboxes.pop(running.request_id, None)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends those that run; the rest is passed over."""
        for request_id in request_ids:
            for outbox in self._outboxes.get(request_id, ()):
                outbox.fail(RequestAborted("aborted by its id"))
