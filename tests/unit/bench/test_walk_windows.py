"""Files that ran in a window, told from traces made by hand."""

from __future__ import annotations

from bench.walk_probe import Event, Function, Kind, Trace
from bench.walk_windows import Process, way_in, way_out

LOOP, ENGINE = 0, 1
MS = 1_000_000


class TraceMaker:
    """Events are told in order."""

    def __init__(self) -> None:
        self.trace = Trace()

    def call(self, at_ms: int, file: str, name: str, kind: Kind = Kind.FUNCTION, thread: int = LOOP) -> None:
        """It ends at once."""
        self._add(at_ms, thread, self._index_of(Function(file, name, kind)), before=0, after=10)

    def enter(self, at_ms: int, file: str, name: str) -> None:
        index = self._index_of(Function(file, name, Kind.FUNCTION))
        self.trace.events.append(Event(at_ms * MS, LOOP, index, True, 0))

    def leave(self, at_ms: int, name: str) -> None:
        """What was entered, and runs until after what was told last."""
        (index,) = (index for index, each in enumerate(self.trace.functions) if each.name == name)
        self.trace.events.append(Event(at_ms * MS + 2, LOOP, index, False, 10))

    def wait(self, at_ms: int, file: str, name: str) -> None:
        """A coroutine is resumed and does not get on."""
        self.trace.functions.append(Function(file, name, Kind.FUNCTION))
        self._add(at_ms, LOOP, len(self.trace.functions) - 1, before=12, after=10)

    def _index_of(self, function: Function) -> int:
        if function not in self.trace.functions:
            self.trace.functions.append(function)
        return self.trace.functions.index(function)

    def _add(self, at_ms: int, thread: int, index: int, *, before: int, after: int) -> None:
        self.trace.events.append(Event(at_ms * MS, thread, index, True, before))
        self.trace.events.append(Event(at_ms * MS + 1, thread, index, False, after))


def test_the_way_in_begins_at_the_servicer_and_ends_at_the_engine() -> None:
    router, decode = TraceMaker(), TraceMaker()
    router.call(1, "router/before.py", "before")
    router.call(2, "router/servicer.py", "InferenceServicer.Generate")
    router.call(3, "router/intake.py", "Intake.read")
    router.call(3, "router/choice.py", "Choice.__init__", Kind.CONSTRUCTOR)
    router.wait(3, "router/waits.py", "waits")
    decode.call(4, "decode_worker/worker.py", "DecodeWorker.reserve")
    decode.call(5, "engine/engine_thread.py", "EngineThread.step")
    decode.call(6, "decode_worker/after.py", "after")
    processes = {"router": Process.of(router.trace), "decode_worker": Process.of(decode.trace)}
    files = way_in(processes, [(0, 9 * MS)])
    assert list(files) == ["decode_worker/worker.py", "router/intake.py", "router/servicer.py"]


def test_the_way_out_leaves_the_plan_of_the_next_step_out() -> None:
    """Results are collected on the loop; the next step is planned long after the tokens have left."""
    router, decode = TraceMaker(), TraceMaker()
    for begin_ms in range(0, 200, 20):
        decode.call(begin_ms, "engine/runner.py", "Runner.collect")
        decode.enter(begin_ms + 1, "decode_worker/step_loop.py", "StepLoop.run")
        decode.call(begin_ms + 2, "worker/serving/router_session.py", "RouterSession.token")
        decode.call(begin_ms + 3, "decode_worker/step_timing.py", "StepTiming.launch_after_s")
        decode.leave(begin_ms + 3, "StepLoop.run")
        decode.call(begin_ms + 5, "worker/serving/service.py", "WorkerServicer._write")
        router.call(begin_ms + 6, "router/worker_link.py", "WorkerLink._dispatch")
        decode.call(begin_ms + 10, "engine/forward.py", "forward", thread=ENGINE)
        decode.enter(begin_ms + 15, "decode_worker/step_loop.py", "StepLoop.run")
        decode.call(begin_ms + 16, "decode_worker/scheduler.py", "plan_step")
        decode.call(begin_ms + 17, "engine/engine_thread.py", "EngineThread.launch")
        decode.leave(begin_ms + 17, "StepLoop.run")
    processes = {"router": Process.of(router.trace), "decode_worker": Process.of(decode.trace)}
    files = way_out(processes, "decode_worker", [(-1, 200 * MS)])
    assert [file for file in files if not file.startswith("engine/")] == [
        "decode_worker/step_loop.py",
        "router/worker_link.py",
        "worker/serving/router_session.py",
        "worker/serving/service.py",
    ]
