"""Requests that Abort can end, by the ids that their callers chose. An id may run more than once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from router.entrance import RunningRequest
from tandem.errors import TandemError


class RequestAborted(TandemError):
    """Somebody ended the request by its id; its own caller is answered, not refused."""


class Abortable:
    """A request that may be aborted, from before its prompt is read."""

    def __init__(self) -> None:
        self._aborted = False
        self._running: RunningRequest | None = None

    def begin(self, running: RunningRequest) -> None:
        """Marks the request as running, unless it was aborted before."""
        self._running = running
        if self._aborted:
            self.abort()

    def abort(self) -> None:
        """Aborts the request: its outbox ends with RequestAborted, and its holdings are released."""
        self._aborted = True
        if self._running is not None:
            self._running.cancel(RequestAborted("aborted by its id"))


class Aborts:
    """Single-threaded."""

    def __init__(self) -> None:
        self._listed: dict[str, list[Abortable]] = {}

    @contextmanager
    def listed(self, request_id: str) -> Iterator[Abortable]:
        """While inside, `abort` finds the request."""
        abortable = Abortable()
        same_id = self._listed.setdefault(request_id, [])
        same_id.append(abortable)
        try:
            yield abortable
        finally:
            same_id.remove(abortable)
            if not same_id:
                del self._listed[request_id]

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends those that are under way; the rest is passed over, and so is "", which many may be listed by."""
        for request_id in filter(None, request_ids):
            for abortable in self._listed.get(request_id, ()):
                abortable.abort()
