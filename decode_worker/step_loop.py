"""Keeps the engine stepping: plan, launch, wait, apply. Up to two steps are in flight.

    launch k ────────────── wait ──────┬─ k ends: apply k ─┬─ k + 1 ends: apply …
                                       │                   │
             just before k's end: launch k + 1   just before its end: launch k + 2

The engine computes in its own thread; while a step runs, the control loop is free. A second step is launched behind a
decode step only, when that is about to end (`step_timing`), and only if waiting for its end would not bring a better
one (`RunningBatch.step_behind`); the tokens it starts from then go from step to step inside the engine. A sequence
that turns out to have ended costs one discarded token. When no sequence can step, the loop sleeps until `wake`.

A step that raises fails the requests in it and nobody else, each once; one whose logits are broken fails alone. A bug
in the planning itself ends `run`, and with it the process.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from decode_worker.running_batch import BatchedStep, RunningBatch
from decode_worker.step_outputs import StepOutputs
from decode_worker.step_timing import StepTiming
from engine.engine_thread import EngineBroken
from engine.step import StepResult
from engine.thread_work import to_the_end
from tandem.clock import Clock
from tandem.errors import InternalError, TandemError
from tandem.telemetry.logging import get_logger
from tandem.telemetry.observers import StepReport, WorkerObserver
from worker.ports import StepEngine

_log = get_logger(__name__)


@dataclass(slots=True)
class _InFlight:
    """A launched step."""

    batched: BatchedStep
    result: asyncio.Future[StepResult]
    started_s: float
    """When the engine began with it, as far as the loop can tell."""


class StepLoop:
    """Runs until cancelled. All on the control loop."""

    def __init__(
        self,
        batch: RunningBatch,
        engine: StepEngine,
        clock: Clock,
        outputs: StepOutputs,
        on_step_ended: Callable[[], None],
        observer: WorkerObserver,
        *,
        overlap: bool,
    ) -> None:
        """`overlap`: whether a second step may be in flight."""
        self._batch = batch
        self._engine = engine
        self._clock = clock
        self._outputs = outputs
        self._on_step_ended = on_step_ended
        self._observer = observer
        self._overlap = overlap
        self._timing = StepTiming()
        self._in_flight: deque[_InFlight] = deque()
        self._work = asyncio.Event()

    def wake(self) -> None:
        """Something has changed: look again for work."""
        self._work.set()

    async def run(self) -> None:
        """Steps while there is work, sleeps while there is none. Ends by cancellation, or raises EngineBroken.

        It does not end before every launched step has.
        """
        try:
            while True:
                self._work.clear()
                if not self._in_flight and not self._launch(self._batch.next_step):
                    await self._work.wait()
                    continue
                await self._launch_behind()
                await self._end_oldest()
        finally:
            await self._drain()

    def _launch(self, plan: Callable[[], BatchedStep | None]) -> bool:
        """Launches what `plan` returns; False if that is nothing."""
        began_s = self._clock.now_s()
        batched = plan()
        if batched is None:
            return False
        for request, _ in batched.seqs:
            if request.started_s is None:
                request.started_s = began_s
                request.observer.started()
        self._batch.releases.step_launched()
        result, now_s = self._launched(batched), self._clock.now_s()
        self._in_flight.append(_InFlight(batched, result, now_s))
        self._timing.planning_took(now_s - began_s)
        return True

    def _launched(self, batched: BatchedStep) -> asyncio.Future[StepResult]:
        try:
            return asyncio.ensure_future(self._engine.launch(batched.step))
        except Exception as error:  # noqa: BLE001 - one way out for all that goes wrong with a step
            failed = asyncio.get_running_loop().create_future()
            failed.set_exception(error)
            return failed

    async def _launch_behind(self) -> None:
        """Waits until the step in flight has ended, or launches the next one behind it shortly before."""
        running = self._in_flight[0]
        if not self._overlap or not running.batched.is_decode:
            return
        after_s = self._timing.launch_after_s(len(running.batched.seqs))
        if after_s is None:
            return
        timeout_s = running.started_s + after_s - self._clock.now_s()
        if timeout_s > 0:
            await asyncio.wait({running.result}, timeout=timeout_s)
        if not running.result.done():
            self._launch(lambda: self._batch.step_behind(running.batched))

    async def _end_oldest(self) -> None:
        """Waits for the oldest step in flight and applies what it brought."""
        batched, future = self._in_flight[0].batched, self._in_flight[0].result
        await asyncio.wait({future})  # not the future itself: a cancelled wait must leave the step alone
        self._ended()
        try:
            result = future.result()
        except EngineBroken as error:
            self._outputs.fail(batched, error)
            raise
        except Exception as error:  # noqa: BLE001 - the step's root: one bad batch must not stop the others
            _log.exception("a step failed", num_seqs=len(batched.seqs))
            known = error if isinstance(error, TandemError) else None
            self._outputs.fail(batched, known or InternalError(f"a step broke: {type(error).__name__}"))
        else:
            self._report(batched, result.seconds)
            self._outputs.apply(batched, result)
        self._on_step_ended()

    def _ended(self) -> None:
        self._in_flight.popleft()
        self._batch.releases.step_ended()
        if self._in_flight:
            self._in_flight[0].started_s = self._clock.now_s()

    def _report(self, batched: BatchedStep, seconds: float) -> None:
        if batched.is_decode:
            self._timing.step_took(len(batched.seqs), seconds)
        num_tokens = sum(len(seq.token_ids) for seq in batched.step.seqs)
        specs = tuple([request.spec for request, _ in batched.seqs])
        self._observer.step(StepReport(seconds, num_tokens - batched.num_decodes, batched.num_decodes, specs))

    async def _drain(self) -> None:
        """Waits for what is in flight, cancelled or not."""
        while self._in_flight:
            with suppress(Exception, asyncio.CancelledError):
                await to_the_end(self._in_flight[0].result)
            self._ended()
            self._on_step_ended()
