"""Several observers as one: each is told everything, in the order in which they are given.

One alone is passed through as it is, so that fan-out costs nothing where nobody fans out.
"""

from __future__ import annotations

from collections.abc import Iterable

from tandem.errors import TandemError
from tandem.telemetry.observers import (
    RequestEnd,
    RequestObserver,
    RequestStart,
    RouterObserver,
    SequenceObserver,
    StepReport,
    WorkerObserver,
)
from tandem.types import GroupSpec, WorkerInfo


def router_observers(observers: Iterable[RouterObserver]) -> RouterObserver:
    """All of them as one. The first one decides the trace context that workers are given."""
    first, *others = tuple(observers) or (RouterObserver(),)
    return _Routers((first, *others)) if others else first


def request_observers(first: RequestObserver, *others: RequestObserver) -> RequestObserver:
    """Those of one request as one. The first one decides the trace context that workers are given."""
    return _Requests((first, *others)) if others else first


def worker_observers(observers: Iterable[WorkerObserver]) -> WorkerObserver:
    """All of them as one."""
    first, *others = tuple(observers) or (WorkerObserver(),)
    return _Workers((first, *others)) if others else first


class _Routers(RouterObserver):
    def __init__(self, observers: tuple[RouterObserver, ...]) -> None:
        self._all = observers

    def request(self, start: RequestStart) -> RequestObserver:
        return request_observers(*(each.request(start) for each in self._all))

    def refused(self, error: TandemError) -> None:
        for each in self._all:
            each.refused(error)


class _Requests(RequestObserver):
    __slots__ = ("_all",)

    def __init__(self, observers: tuple[RequestObserver, ...]) -> None:
        super().__init__(observers[0].traceparent)
        self._all = observers

    def admitted(self) -> None:
        for each in self._all:
            each.admitted()

    def placed(self, prefill: WorkerInfo | None, decode: WorkerInfo) -> None:
        for each in self._all:
            each.placed(prefill, decode)

    def prompt_computed(self, queue_s: float, prefill_s: float) -> None:
        for each in self._all:
            each.prompt_computed(queue_s, prefill_s)

    def handed_over(self, num_bytes: int, seconds: float) -> None:
        for each in self._all:
            each.handed_over(num_bytes, seconds)

    def tokens(self, num_tokens: int, index: int = 0) -> None:
        for each in self._all:
            each.tokens(num_tokens, index)

    def moved(self, culprit: WorkerInfo, error: TandemError) -> None:
        for each in self._all:
            each.moved(culprit, error)

    def ended(self, end: RequestEnd) -> None:
        for each in self._all:
            each.ended(end)


class _Sequences(SequenceObserver):
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


class _Workers(WorkerObserver):
    def __init__(self, observers: tuple[WorkerObserver, ...]) -> None:
        self._all = observers

    def sequence(self, spec: GroupSpec) -> SequenceObserver:
        return _Sequences(tuple(each.sequence(spec) for each in self._all))

    def step(self, report: StepReport) -> None:
        for each in self._all:
            each.step(report)
