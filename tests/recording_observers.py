"""Observers that write down what they were told, for any room; and the rule that all tellers keep.

INVARIANT: `ended` comes exactly once, last. Violations are kept, not raised: whoever tells an
observer may swallow what it raises.
"""

from __future__ import annotations

from typing import Any

from shell.telemetry.observers import (
    RequestEnd,
    RequestObserver,
    RequestStart,
    RouterObserver,
    SequenceObserver,
    StepReport,
    WorkerObserver,
)
from tandem.errors import TandemError
from tandem.types import GroupSpec, MoveReason, PlacementReason, PrefixAt, WorkerInfo


class Record:
    """The calls that one observer got, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    @property
    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    @property
    def story(self) -> list[str]:
        """Names, repetitions in a row left out."""
        names = self.names
        return [name for before, name in zip(["", *names], names, strict=False) if name != before]

    def args(self, name: str) -> tuple[Any, ...]:
        """Of the one call of this name."""
        ((_, *args),) = [call for call in self.calls if call[0] == name]
        return tuple(args)

    @property
    def ended_once_and_last(self) -> bool:
        return self.names.count("ended") == 1 and self.names[-1] == "ended"


class RecordedRequest(Record, RequestObserver):
    def __init__(self, start: RequestStart) -> None:
        Record.__init__(self)
        RequestObserver.__init__(self, start.traceparent)
        self.start = start

    @property
    def end(self) -> RequestEnd:
        (end,) = self.args("ended")
        assert isinstance(end, RequestEnd)
        return end

    def admitted(self) -> None:
        self.calls.append(("admitted",))

    def placed(
        self, prefill: WorkerInfo | None, decode: WorkerInfo, reason: PlacementReason, prefix_at: PrefixAt
    ) -> None:
        self.calls.append(("placed", prefill, decode, reason, prefix_at))

    def prompt_computed(self, queue_s: float, prefill_s: float, cached_tokens: int) -> None:
        self.calls.append(("prompt_computed", queue_s, prefill_s, cached_tokens))

    def handed_over(self, num_bytes: int, seconds: float) -> None:
        self.calls.append(("handed_over", num_bytes, seconds))

    def tokens(self, num_tokens: int, index: int = 0) -> None:
        self.calls.append(("tokens", num_tokens, index))

    def moved(self, culprit: WorkerInfo, error: TandemError) -> None:
        self.calls.append(("moved", culprit, error))

    def ended(self, end: RequestEnd) -> None:
        self.calls.append(("ended", end))


class RecordingRouter(RouterObserver):
    def __init__(self) -> None:
        self.requests: list[RecordedRequest] = []
        self.refusals: list[TandemError] = []

    def request(self, start: RequestStart) -> RecordedRequest:
        self.requests.append(RecordedRequest(start))
        return self.requests[-1]

    def refused(self, error: TandemError) -> None:
        self.refusals.append(error)

    def check_all_ended(self) -> None:
        for request in self.requests:
            assert request.ended_once_and_last, request.names


class RecordedSequence(Record, SequenceObserver):
    def __init__(self, spec: GroupSpec) -> None:
        super().__init__()
        self.spec = spec

    def reserved(self) -> None:
        self.calls.append(("reserved",))

    def looked_up(self, num_tokens: int, num_cached_tokens: int) -> None:
        self.calls.append(("looked_up", num_tokens, num_cached_tokens))

    def started(self) -> None:
        self.calls.append(("started",))

    def first_token(self) -> None:
        self.calls.append(("first_token",))

    def transfer_started(self) -> None:
        self.calls.append(("transfer_started",))

    def transferred(self, num_bytes: int, seconds: float, transport: str | None) -> None:
        self.calls.append(("transferred", num_bytes, seconds, transport))

    def moved(self, reason: MoveReason) -> None:
        self.calls.append(("moved", reason))

    def preempted(self) -> None:
        self.calls.append(("preempted",))

    def ended(self, error: TandemError | None, num_tokens: int) -> None:
        self.calls.append(("ended", error, num_tokens))


class RecordingWorker(WorkerObserver):
    def __init__(self) -> None:
        self.sequences: list[RecordedSequence] = []
        self.steps: list[StepReport] = []

    def sequence(self, spec: GroupSpec, *, for_another: bool = False) -> RecordedSequence:
        self.sequences.append(RecordedSequence(spec))
        return self.sequences[-1]

    def step(self, report: StepReport) -> None:
        self.steps.append(report)

    def check_all_ended(self) -> None:
        for sequence in self.sequences:
            assert sequence.ended_once_and_last, sequence.names
            for name in ("reserved", "looked_up", "started", "first_token", "transfer_started", "transferred"):
                assert sequence.names.count(name) <= 1, sequence.names
