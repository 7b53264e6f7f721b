from __future__ import annotations

from shell.telemetry.observers import (
    RequestEnd,
    RequestStart,
    RouterObserver,
    StepReport,
    WorkerObserver,
    router_observers,
    worker_observers,
)
from tandem.errors import InternalError
from tandem.types import GroupSpec, PlacementReason, PrefixAt, RequestId, SamplingParams, TokenId
from tests.recording_observers import RecordingRouter, RecordingWorker

START = RequestStart(RequestId("r"), 3, SamplingParams(4), 0, "trace", 0.5)
SPEC = GroupSpec(RequestId("r"), (TokenId(1),), SamplingParams(max_tokens=1))
CALLS = {
    "admitted": (),
    "placed": (None, None, PlacementReason.LOCAL_SHORT, PrefixAt.NOWHERE),
    "prompt_computed": (1.0, 2.0, 3),
    "handed_over": (100, 0.5),
    "tokens": (3, 1),
    "moved": (None, InternalError("x")),
    "ended": (RequestEnd(3, 1.0),),
}
SEQUENCE_CALLS = {
    "reserved": (),
    "looked_up": (9, 4),
    "started": (),
    "first_token": (),
    "transfer_started": (),
    "transferred": (100, 0.5, "shm"),
    "preempted": (),
    "ended": (None, 2),
}


def test_each_router_observer_hears_everything_in_order() -> None:
    recorders = [RecordingRouter(), RecordingRouter()]
    together = router_observers(recorders)
    request = together.request(START)
    for name, args in CALLS.items():
        getattr(request, name)(*args)
    error = InternalError("no")
    together.refused(error)
    for recorder in recorders:
        assert recorder.requests[0].start is START
        assert recorder.requests[0].calls == [(name, *args) for name, args in CALLS.items()]
        assert recorder.refusals == [error]


def test_the_first_one_has_the_word_on_the_trace() -> None:
    class Renamed(RouterObserver):
        def request(self, start: RequestStart) -> object:  # type: ignore[override]
            return type("Request", (), {"traceparent": "mine"})()

    assert router_observers([Renamed(), RecordingRouter()]).request(START).traceparent == "mine"
    assert router_observers([RecordingRouter(), Renamed()]).request(START).traceparent == "trace"


def test_each_worker_observer_hears_everything_in_order() -> None:
    recorders = [RecordingWorker(), RecordingWorker()]
    together = worker_observers(recorders)
    sequence = together.sequence(SPEC)
    for name, args in SEQUENCE_CALLS.items():
        getattr(sequence, name)(*args)
    report = StepReport(0.1, 1, 0, (SPEC,))
    together.step(report)
    for recorder in recorders:
        assert recorder.sequences[0].spec is SPEC
        assert recorder.sequences[0].calls == [(name, *args) for name, args in SEQUENCE_CALLS.items()]
        assert recorder.steps == [report]


def test_one_alone_is_not_wrapped() -> None:
    router, worker = RecordingRouter(), RecordingWorker()
    assert router_observers([router]) is router
    assert worker_observers([worker]) is worker


def test_nobody_is_silent() -> None:
    silent, worker = router_observers([]), worker_observers([])
    assert isinstance(silent, RouterObserver)
    assert isinstance(worker, WorkerObserver)
    request, sequence = silent.request(START), worker.sequence(SPEC)
    assert request.traceparent == "trace"
    for name, args in CALLS.items():
        getattr(request, name)(*args)
    for name, args in SEQUENCE_CALLS.items():
        getattr(sequence, name)(*args)
