"""The seam between serving and what watches it: rooms tell what happened, metrics and traces listen.

    router   RouterObserver.request ─▶ RequestObserver: admitted → placed → … → ended
    worker   WorkerObserver.sequence ─▶ SequenceObserver: started → first_token → transferred → ended
             WorkerObserver.step after every engine step

A request that was begun may still be turned away by admission: it ends without `admitted`.
The classes themselves do nothing: a subclass overrides what it listens to, and an instance is what to give where
nobody listens. `router_observers`, `request_observers` and `worker_observers` make one of several, each of which is
told everything, in the order in which they are given.

Calls come on the control loop, in order, from the hot path: an observer must neither await, block
nor raise. Each `ended` comes exactly once, last, whatever way it went. Nothing here carries
prompts or completions but `GroupSpec`, whose token ids an observer must not export.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.errors import TandemError
from tandem.types import (
    FinishReason,
    GroupSpec,
    MoveReason,
    PlacementReason,
    PrefixAt,
    RequestId,
    SamplingParams,
    WorkerInfo,
)


@dataclass(frozen=True, slots=True)
class RequestStart:
    """A request that was read, judged and is about to ask for admission."""

    request_id: RequestId
    num_prompt_tokens: int
    sampling: SamplingParams
    priority: int
    traceparent: str
    """W3C trace context that the caller sent, or that was minted."""
    age_s: float
    """Time since the call arrived: reading and tokenizing took it."""
    num_choices: int = 1
    is_chat: bool = False
    """Its prompt came as a chat, to be rendered here."""


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """How a request ended: `finish_reasons` set = finished; `error` set = failed; neither = cancelled."""

    num_completion_tokens: int
    """Of all choices together."""
    total_s: float
    """Arrival to the last token, or to the end where none came."""
    finish_reasons: tuple[FinishReason, ...] = ()
    """One per choice, by index."""
    error: TandemError | None = None


class RequestObserver:
    """Hears of one request on the router. `traceparent` is what workers are given as the parent of their spans."""

    __slots__ = ("traceparent",)

    def __init__(self, traceparent: str = "") -> None:
        self.traceparent = traceparent

    def admitted(self) -> None:
        """It got a place."""

    def placed(
        self, prefill: WorkerInfo | None, decode: WorkerInfo, reason: PlacementReason, prefix_at: PrefixAt
    ) -> None:
        """It goes to this pair; again for each further try. None = prefilled on the decode worker.

        `prefix_at`: where KV of its first tokens seemed to be.
        """

    def prompt_computed(self, queue_s: float, prefill_s: float, cached_tokens: int) -> None:
        """A worker computed the prompt, begun `queue_s` after arrival; told again for each further try.

        `cached_tokens`: of the prompt, whose KV that worker had already.
        """

    def handed_over(self, num_bytes: int, seconds: float) -> None:
        """The prompt's KV reached the decode worker."""

    def tokens(self, num_tokens: int, index: int = 0) -> None:
        """So many further tokens of choice `index` are known, in order."""

    def moved(self, culprit: WorkerInfo, error: TandemError) -> None:
        """A try failed by `culprit`; another follows if retries are left."""

    def ended(self, end: RequestEnd) -> None:
        """Nothing more is heard of it."""


class RouterObserver:
    """Hears of all requests on the router."""

    def request(self, start: RequestStart) -> RequestObserver:
        """A request begins."""
        return RequestObserver(start.traceparent)

    def refused(self, error: TandemError) -> None:
        """A request was turned away before it began: bad input, overload, draining."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """One engine step that came to its end; what it did is applied after it was reported."""

    seconds: float
    num_prefill_tokens: int
    """Prompt tokens computed in it, those computed again after a preemption included."""
    num_decode_seqs: int
    """Sequences that were decoding, one token each."""
    specs: Sequence[GroupSpec]
    """One per sequence in it."""


class SequenceObserver:
    """Hears of one sequence on one worker, from its arrival there."""

    __slots__ = ()

    def reserved(self) -> None:
        """Decode worker: blocks are promised to it, and a hand-off can come. Not told where it computes the prompt."""

    def looked_up(self, num_tokens: int, num_cached_tokens: int) -> None:
        """Of so many tokens, this worker has the KV of the first `num_cached_tokens`. Told once, before `started`."""

    def started(self) -> None:
        """Its first computation begins: it no longer queues."""

    def first_token(self) -> None:
        """Its prompt is computed here."""

    def transfer_started(self) -> None:
        """Prefill worker: its first blocks go out. Decode worker: a writer has shown the ticket."""

    def transferred(self, num_bytes: int, seconds: float, transport: str | None) -> None:
        """All of its KV was handed over and verified.

        A prefill worker tells the seconds in which it was busy sending. A decode worker tells 0 bytes
        and no transport, for the sender counts them, and the seconds since `transfer_started`.
        """

    def moved(self, reason: MoveReason) -> None:
        """Decode worker: it runs on at another one, which has its KV."""

    def preempted(self) -> None:
        """Its blocks were taken; it will be computed again."""

    def ended(self, error: TandemError | None, num_tokens: int) -> None:
        """It left this worker after `num_tokens` sampled here; `error` None = done, or no longer wanted.

        A TransferError says that its hand-off failed.
        """


class WorkerObserver:
    """Hears of all that happens on one worker."""

    def sequence(self, spec: GroupSpec, *, for_another: bool = False) -> SequenceObserver:
        """A sequence arrives; `for_another`: to be computed and handed over."""
        return SequenceObserver()

    def step(self, report: StepReport) -> None:
        """A step is over."""


def router_observers(observers: Iterable[RouterObserver]) -> RouterObserver:
    """All of them as one; one alone as it is. The first one decides the trace context that workers are given."""
    first, *others = tuple(observers) or (RouterObserver(),)
    return _Routers((first, *others)) if others else first


def request_observers(first: RequestObserver, *others: RequestObserver) -> RequestObserver:
    """As `router_observers`, for those of one request."""
    return _Requests((first, *others)) if others else first


def worker_observers(observers: Iterable[WorkerObserver]) -> WorkerObserver:
    """All of them as one; one alone as it is."""
    first, *others = tuple(observers) or (WorkerObserver(),)
    return _Workers((first, *others)) if others else first


def _telling_all(cls: type) -> Any:
    """Gives `cls`, for each method of its base that it does not define, one that calls those of all in `self._all`."""

    def telling(name: str) -> Callable[..., None]:
        def tell(self: Any, *args: Any) -> None:
            for each in self._all:
                getattr(each, name)(*args)

        return tell

    (base,) = cls.__bases__
    for name, member in vars(base).items():
        if inspect.isfunction(member) and name not in vars(cls) and not name.startswith("_"):
            setattr(cls, name, telling(name))
    return cls


@_telling_all
class _Routers(RouterObserver):
    def __init__(self, observers: tuple[RouterObserver, ...]) -> None:
        self._all = observers

    def request(self, start: RequestStart) -> RequestObserver:
        return request_observers(*(each.request(start) for each in self._all))


@_telling_all
class _Requests(RequestObserver):
    __slots__ = ("_all",)

    def __init__(self, observers: tuple[RequestObserver, ...]) -> None:
        super().__init__(observers[0].traceparent)
        self._all = observers

    def tokens(self, num_tokens: int, index: int = 0) -> None:  # written out because it is called for each token
        for each in self._all:
            each.tokens(num_tokens, index)


@_telling_all
class _Workers(WorkerObserver):
    def __init__(self, observers: tuple[WorkerObserver, ...]) -> None:
        self._all = observers

    def sequence(self, spec: GroupSpec, *, for_another: bool = False) -> SequenceObserver:
        return _Sequences(tuple(each.sequence(spec, for_another=for_another) for each in self._all))


@_telling_all
class _Sequences(SequenceObserver):
    __slots__ = ("_all",)

    def __init__(self, observers: tuple[SequenceObserver, ...]) -> None:
        self._all = observers
