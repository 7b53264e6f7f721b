"""What happens to requests, as values, and those who listen: rooms emit, metrics and spans match what they know.

    router   RequestBegan ─▶ Admitted → Placed → … → RequestEnded       RequestRefused
    worker   SequenceArrived ─▶ Started → FirstToken → … → SequenceEnded     StepEnded

A listener of a process hears of all requests there. Where it answers the event that begins a request with a second
listener, that one hears of this request alone. A request that began may still be refused by admission: it ends without
`Admitted`.

Events come on the control loop, in order, from the hot path: a listener must neither await, block nor raise. The event
that ends a request comes exactly once, last, whatever way it went. No event carries prompts or completions but
`SequenceArrived`, whose token ids a listener must not export.

One noun, one meaning: a hand-off takes KV from a prefill worker to a decode worker, a move takes a running request from
one decode worker to another, a try is the router's: all on one pair of workers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from tandem.errors import TandemError
from tandem.types import (
    UNKNOWN_ROUTE,
    FinishReason,
    GroupSpec,
    KvRoute,
    MoveReason,
    PlacementReason,
    PrefixAt,
    RequestId,
    SamplingParams,
    WorkerInfo,
)

E = TypeVar("E")
P = TypeVar("P")


class Events(Generic[E]):
    """Emits to each of its listeners, in the order in which they are given."""

    __slots__ = ("_listeners",)

    def __init__(self, *listeners: Callable[[E], object]) -> None:
        self._listeners = listeners

    def emit(self, event: E) -> None:
        """Calls every listener."""
        for hear in self._listeners:
            hear(event)


class ProcessEvents(Generic[P, E]):
    """Emits what happens in a process, and makes the events of each request that begins there."""

    __slots__ = ("_listeners",)

    def __init__(self, *listeners: Callable[[P], Callable[[E], None] | None]) -> None:
        self._listeners = listeners

    def emit(self, event: P) -> None:
        """Calls every listener."""
        for hear in self._listeners:
            hear(event)

    def begin(self, event: P, *others: Callable[[E], None]) -> Events[E]:
        """Emits the event that begins a request. Returns the events of that request, which `others` hear too."""
        answers = [hear(event) for hear in self._listeners]
        return Events(*filter(None, answers), *others)


# --- a request on the router ---


@dataclass(frozen=True, slots=True)
class RequestBegan:
    """A request was read and judged, and is about to ask for admission."""

    request_id: RequestId
    num_prompt_tokens: int
    sampling: SamplingParams
    priority: int
    traceparent: str
    """W3C trace context that the caller sent, or that was minted."""
    num_choices: int = 1
    is_chat: bool = False
    """Whether the prompt came as a chat, to be rendered here."""


@dataclass(frozen=True, slots=True)
class RequestRefused:
    """A request was refused before its start: bad input, overload, draining."""

    error: TandemError


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request has a place among the running requests."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The request goes to this pair of workers; once for each try and each move."""

    prefill: WorkerInfo | None
    """None = the decode worker computes the prompt. In a move, the decode worker that the request leaves."""
    decode: WorkerInfo
    reason: PlacementReason
    prefix_at: PrefixAt
    """Where KV of the request's first tokens seemed to be."""


@dataclass(frozen=True, slots=True)
class PromptComputed:
    """A worker computed the prompt; once for each try."""

    queue_s: float
    """From the request's arrival to the begin of the computation."""
    prefill_s: float
    cached_tokens: int
    """Tokens of the prompt whose KV that worker had already."""


@dataclass(frozen=True, slots=True)
class KvArrived:
    """The request's KV reached the decode worker, by a hand-off or a move."""

    num_bytes: int
    seconds: float
    route: KvRoute = UNKNOWN_ROUTE


@dataclass(frozen=True, slots=True)
class TokensArrived:
    """Further tokens of choice `index` are known, in order: one event for all that came together."""

    num_tokens: int
    index: int = 0


@dataclass(frozen=True, slots=True)
class TryFailed:
    """A try failed by `culprit`; another try follows if retries are left."""

    culprit: WorkerInfo
    error: TandemError


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """The request ended: `finish_reasons` set = finished; `error` set = failed; neither = cancelled."""

    num_completion_tokens: int
    """Tokens of all choices together."""
    finish_reasons: tuple[FinishReason, ...] = ()
    """Reasons by index of the choice."""
    error: TandemError | None = None


RouterEvent: TypeAlias = RequestBegan | RequestRefused
RequestEvent: TypeAlias = Admitted | Placed | PromptComputed | KvArrived | TokensArrived | TryFailed | RequestEnded
RequestListener: TypeAlias = Callable[[RequestEvent], None]
RouterListener: TypeAlias = Callable[[RouterEvent], RequestListener | None]
RequestEvents: TypeAlias = Events[RequestEvent]
RouterEvents: TypeAlias = ProcessEvents[RouterEvent, RequestEvent]


# --- a sequence on a worker ---


@dataclass(frozen=True, slots=True)
class SequenceArrived:
    """A sequence arrived at a worker."""

    spec: GroupSpec
    for_another: bool = False
    """Whether a worker that also decodes is to compute the prompt and hand it off."""


@dataclass(frozen=True, slots=True)
class StepEnded:
    """An engine step ended; its results are applied after this event."""

    seconds: float
    num_prefill_tokens: int
    """Prompt tokens computed in the step, those computed again after a preemption included."""
    num_decode_seqs: int
    """Number of sequences that decoded a token each."""
    num_seqs: int


@dataclass(frozen=True, slots=True)
class TransportBarred:
    """Checksums failed repeatedly over a transport: no hand-off to that decode worker takes the transport any more."""

    transport: str


@dataclass(frozen=True, slots=True)
class BlocksReserved:
    """Decode worker: a hand-off can come into reserved blocks. Not emitted where the prompt is computed there."""


@dataclass(frozen=True, slots=True)
class PrefixLookedUp:
    """This worker has the KV of the first `num_cached_tokens` of `num_tokens`; once, before `Started`."""

    num_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Started:
    """The sequence's first computation begins; its time in line is over."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The sequence's prompt is computed here."""


@dataclass(frozen=True, slots=True)
class TransferStarted:
    """Prefill worker: the first blocks go out. Decode worker: a writer has shown the ticket."""


@dataclass(frozen=True, slots=True)
class Transferred:
    """All of the sequence's KV was transferred and verified."""

    num_bytes: int
    """Bytes sent; 0 at the receiver, since the sender counts."""
    seconds: float
    """Seconds: at the sender, of work; at the receiver, since `TransferStarted`."""
    transport: str | None
    """None at the receiver."""
    num_spans: int = 0
    """Spans of memory in which the bytes travelled, as the sender counts."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Decode worker: the sequence goes on at another one, which has its KV."""

    reason: MoveReason


@dataclass(frozen=True, slots=True)
class Preempted:
    """The sequence's blocks were taken; their content will be computed again."""


@dataclass(frozen=True, slots=True)
class SequenceEnded:
    """The sequence left this worker; no error = done, or no longer wanted. A TransferError: its transfer failed."""

    error: TandemError | None
    num_tokens: int
    """Tokens sampled here."""


WorkerEvent: TypeAlias = SequenceArrived | StepEnded | TransportBarred
SequenceEvent: TypeAlias = (
    BlocksReserved
    | PrefixLookedUp
    | Started
    | FirstToken
    | TransferStarted
    | Transferred
    | Moved
    | Preempted
    | SequenceEnded
)
SequenceListener: TypeAlias = Callable[[SequenceEvent], None]
SequenceEvents: TypeAlias = Events[SequenceEvent]
WorkerEvents: TypeAlias = ProcessEvents[WorkerEvent, SequenceEvent]
