"""Several observers as one: each is told everything, in the order in which they are given.

One alone is passed through as it is, so that fan-out costs nothing where nobody fans out.
"""

from __future__ import annotations

from collections.abc import Iterable

from tandem.errors import TandemError
from tandem.telemetry.observers import (
    RequestEnd,
    RequestListener,
    RequestObserver,
    RequestStart,
    RouterObserver,
    SequenceObserver,
    StepReport,
    WorkerObserver,
)
from tandem.telemetry.observers_silent import SilentRouter, SilentWorker
from tandem.types import GroupSpec, WorkerInfo


def router_observers(observers: Iterable[RouterObserver]) -> RouterObserver:
    """All of them as one. The first one's word on the trace goes to the workers."""
    first, *others = tuple(observers) or (SilentRouter(),)
    return _Routers(first, tuple(others)) if others else first


def worker_observers(observers: Iterable[WorkerObserver]) -> WorkerObserver:
    """All of them as one."""
    first, *others = tuple(observers) or (SilentWorker(),)
    return _Workers((first, *others)) if others else first


class RequestTogether:
    """One request's listeners as one `RequestObserver`; `first` speaks for all on the trace."""

    def __init__(self, first: RequestObserver, *others: RequestListener) -> None:
        self._first = first
        self._all: tuple[RequestListener, ...] = (first, *others)

    @property
    def traceparent(self) -> str:
        """What workers are given as the parent of their spans."""
        return self._first.traceparent

    def admitted(self) -> None:
        """It got a place."""
        for each in self._all:
            each.admitted()

    def placed(self, prefill: WorkerInfo | None, decode: WorkerInfo) -> None:
        """It goes to this pair."""
        for each in self._all:
            each.placed(prefill, decode)

    def prompt_computed(self, queue_s: float, prefill_s: float) -> None:
        """A worker computed the prompt."""
        for each in self._all:
            each.prompt_computed(queue_s, prefill_s)

    def handed_over(self, num_bytes: int, seconds: float) -> None:
        """The prompt's KV reached the decode worker."""
        for each in self._all:
            each.handed_over(num_bytes, seconds)

    def tokens(self, num_tokens: int) -> None:
        """So many further tokens are known."""
        for each in self._all:
            each.tokens(num_tokens)

    def moved(self, culprit: WorkerInfo, error: TandemError) -> None:
        """A try failed."""
        for each in self._all:
            each.moved(culprit, error)

    def ended(self, end: RequestEnd) -> None:
        """Nothing more is heard of it."""
        for each in self._all:
            each.ended(end)


class _Routers:
    def __init__(self, first: RouterObserver, others: tuple[RouterObserver, ...]) -> None:
        self._first = first
        self._others = others

    def request(self, start: RequestStart) -> RequestObserver:
        return RequestTogether(self._first.request(start), *(each.request(start) for each in self._others))

    def refused(self, error: TandemError) -> None:
        for each in (self._first, *self._others):
            each.refused(error)


class _Sequences:
    def __init__(self, observers: tuple[SequenceObserver, ...]) -> None:
        self._all = observers

    def reserved(self) -> None:
        for each in self._all:
            each.reserved()

    def started(self) -> None:
        for each in self._all:
            each.started()

    def first_token(self) -> None:
        for each in self._all:
            each.first_token()

    def transfer_started(self) -> None:
        for each in self._all:
            each.transfer_started()

    def transferred(self, num_bytes: int, seconds: float, transport: str | None) -> None:
        for each in self._all:
            each.transferred(num_bytes, seconds, transport)

    def preempted(self) -> None:
        for each in self._all:
            each.preempted()

    def ended(self, error: TandemError | None, num_tokens: int) -> None:
        for each in self._all:
            each.ended(error, num_tokens)


class _Workers:
    def __init__(self, observers: tuple[WorkerObserver, ...]) -> None:
        self._all = observers

    def sequence(self, spec: GroupSpec) -> SequenceObserver:
        return _Sequences(tuple(each.sequence(spec) for each in self._all))

    def step(self, report: StepReport) -> None:
        for each in self._all:
            each.step(report)
