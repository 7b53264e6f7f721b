from __future__ import annotations

from shell.telemetry.events import (
    Admitted,
    FirstToken,
    ProcessEvents,
    RequestBegan,
    RequestEnded,
    RequestRefused,
    RouterEvents,
    SequenceArrived,
    SequenceEnded,
    StepEnded,
    TokensArrived,
    WorkerEvents,
)
from tandem.errors import InternalError
from tandem.types import GroupSpec, RequestId, SamplingParams, TokenId
from tests.recorded_events import RecordedRouter, RecordedWorker

BEGAN = RequestBegan(RequestId("r"), 3, SamplingParams(4), 0, "trace")
SPEC = GroupSpec(RequestId("r"), (TokenId(1),), SamplingParams(max_tokens=1))


def test_each_listener_of_a_router_hears_all_in_order() -> None:
    recorded = [RecordedRouter(), RecordedRouter()]
    events: RouterEvents = ProcessEvents(*(each.hear for each in recorded))
    request, error = events.begin(BEGAN), InternalError("no")
    for event in (Admitted(), TokensArrived(3, 1), RequestEnded(3)):
        request.emit(event)
    events.emit(RequestRefused(error))
    for each in recorded:
        assert each.requests[0].began is BEGAN
        assert each.requests[0].calls == [("Admitted",), ("TokensArrived", 3, 1), ("RequestEnded", 3, (), None)]
        assert each.refusals == [error]


def test_each_listener_of_a_worker_hears_all_in_order() -> None:
    recorded = [RecordedWorker(), RecordedWorker()]
    events: WorkerEvents = ProcessEvents(*(each.hear for each in recorded))
    sequence, step = events.begin(SequenceArrived(SPEC)), StepEnded(0.1, 1, 0, 1)
    for event in (FirstToken(), SequenceEnded(None, 2)):
        sequence.emit(event)
    events.emit(step)
    for each in recorded:
        assert each.sequences[0].spec is SPEC
        assert each.sequences[0].calls == [("FirstToken",), ("SequenceEnded", None, 2)]
        assert each.steps == [step]


def test_who_does_not_listen_to_a_request_hears_only_of_the_process() -> None:
    heard: list[object] = []
    request_heard: list[object] = []
    events: RouterEvents = ProcessEvents(heard.append)
    events.begin(BEGAN, request_heard.append).emit(Admitted())
    assert heard == [BEGAN]
    assert request_heard == [Admitted()]
