"""Listeners that write down the events that they heard, for any room; and the rule that all who emit keep.

INVARIANT: the event that ends a request comes exactly once, last. Violations are kept, not raised: whoever emits may
swallow what a listener raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shell.telemetry.events import (
    Events,
    ProcessEvents,
    RequestBegan,
    RequestEnded,
    RequestEvents,
    RequestListener,
    RequestRefused,
    RouterEvent,
    SequenceArrived,
    SequenceEvents,
    SequenceListener,
    StepEnded,
    WorkerEvent,
    WorkerEvents,
)
from tandem.errors import TandemError
from tandem.types import GroupSpec, RequestId, SamplingParams

_BEGAN = RequestBegan(RequestId("r"), 1, SamplingParams(9), 0, "")


class Recorded:
    """The events that one listener heard, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        """The name of each event and its fields."""

    def hear(self, event: Any) -> None:
        self.calls.append((type(event).__name__, *(getattr(event, field) for field in event.__match_args__)))

    @property
    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    @property
    def story(self) -> list[str]:
        """Names, repetitions in a row left out."""
        names = self.names
        return [name for before, name in zip(["", *names], names, strict=False) if name != before]

    def args(self, name: str) -> tuple[Any, ...]:
        """Fields of the one event of this name."""
        ((_, *args),) = [call for call in self.calls if call[0] == name]
        return tuple(args)

    @property
    def ended_once_and_last(self) -> bool:
        ends = [name for name in self.names if name in {"RequestEnded", "SequenceEnded"}]
        return len(ends) == 1 and self.names[-1] == ends[0]


class RecordedRequest(Recorded):
    def __init__(self, began: RequestBegan = _BEGAN) -> None:
        super().__init__()
        self.began = began
        self.events: RequestEvents = Events(self.hear)

    @property
    def end(self) -> RequestEnded:
        return RequestEnded(*self.args("RequestEnded"))


class RecordedRouter:
    def __init__(self) -> None:
        self.requests: list[RecordedRequest] = []
        self.refusals: list[TandemError] = []

    def hear(self, event: RouterEvent) -> RequestListener | None:
        if isinstance(event, RequestRefused):
            self.refusals.append(event.error)
            return None
        self.requests.append(RecordedRequest(event))
        return self.requests[-1].hear

    def check_all_ended(self) -> None:
        for request in self.requests:
            assert request.ended_once_and_last, request.names


class RecordedSequence(Recorded):
    def __init__(self, spec: GroupSpec) -> None:
        super().__init__()
        self.spec = spec
        self.events: SequenceEvents = Events(self.hear)


class RecordedWorker:
    def __init__(self) -> None:
        self.sequences: list[RecordedSequence] = []
        self.steps: list[StepEnded] = []
        self.on_step: Callable[[], None] = lambda: None
        self.events: WorkerEvents = ProcessEvents(self.hear)

    def hear(self, event: WorkerEvent) -> SequenceListener | None:
        if isinstance(event, SequenceArrived):
            self.sequences.append(RecordedSequence(event.spec))
            return self.sequences[-1].hear
        self.steps.append(event)
        self.on_step()
        return None

    def check_all_ended(self) -> None:
        once = ("BlocksReserved", "PrefixLookedUp", "Started", "FirstToken", "TransferStarted", "Transferred")
        for sequence in self.sequences:
            assert sequence.ended_once_and_last, sequence.names
            for name in once:
                assert sequence.names.count(name) <= 1, sequence.names
