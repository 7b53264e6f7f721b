"""Observers that hear everything and do nothing: for tests, and for who listens to a part only."""

from __future__ import annotations

from tandem.errors import TandemError
from tandem.telemetry.observers import RequestEnd, RequestObserver, RequestStart, SequenceObserver, StepReport
from tandem.types import GroupSpec, WorkerInfo


class SilentListener:
    """A `RequestListener`; a subclass overrides what it listens to."""

    def admitted(self) -> None:
        """It got a place."""

    def placed(self, prefill: WorkerInfo | None, decode: WorkerInfo) -> None:
        """It goes to this pair."""

    def prompt_computed(self, queue_s: float, prefill_s: float) -> None:
        """A worker computed the prompt."""

    def handed_over(self, num_bytes: int, seconds: float) -> None:
        """The prompt's KV reached the decode worker."""

    def tokens(self, num_tokens: int) -> None:
        """So many further tokens are known."""

    def moved(self, culprit: WorkerInfo, error: TandemError) -> None:
        """A try failed."""

    def ended(self, end: RequestEnd) -> None:
        """Nothing more is heard of it."""


class SilentRequest(SilentListener):
    """A `RequestObserver`; workers get the trace context that the request came with."""

    def __init__(self, traceparent: str) -> None:
        self._traceparent = traceparent

    @property
    def traceparent(self) -> str:
        """What workers are given."""
        return self._traceparent


class SilentRouter:
    """A `RouterObserver`."""

    def request(self, start: RequestStart) -> RequestObserver:
        """A request begins."""
        return SilentRequest(start.traceparent)

    def refused(self, error: TandemError) -> None:
        """A request was turned away."""


class SilentSequence:
    """A `SequenceObserver`; a subclass overrides what it listens to."""

    def reserved(self) -> None:
        """Blocks are promised to it."""

    def started(self) -> None:
        """Its first computation begins."""

    def first_token(self) -> None:
        """Its prompt is computed."""

    def transfer_started(self) -> None:
        """KV is under way."""

    def transferred(self, num_bytes: int, seconds: float, transport: str | None) -> None:
        """KV was handed over."""

    def preempted(self) -> None:
        """Its blocks were taken."""

    def ended(self, error: TandemError | None, num_tokens: int) -> None:
        """It left this worker."""


class SilentWorker:
    """A `WorkerObserver`."""

    def sequence(self, spec: GroupSpec) -> SequenceObserver:
        """A sequence arrives."""
        return SilentSequence()

    def step(self, report: StepReport) -> None:
        """A step is over."""
