"""The thread that steps the model, seen from the control loop.

    loop              prepare k ─ launch ──▶ prepare k+1 ─ launch ──▶ … ◀─ result of k
    engine thread             └▶ step k ──────────────────└▶ step k+1
    collecting thread                        waits for k ─▶           on a GPU only

At most two steps are in flight; they run and end in the order of their launch, and the engine thread goes from
one to the next without the loop. A result, or what the step raised, comes only once nothing of the step runs any
more: blocks that no later step touches may be freed then.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from engine.device import is_lost
from engine.runner import Launched, Prepared, Runner
from engine.step import Direction, Step, StepFailed, StepResult
from kernels.group import GroupBroken
from tandem.errors import InternalError

MAX_IN_FLIGHT = 2
MAX_FAILURES = 8
"""So many steps in a row that failed, or drew nothing but broken logits, are not the requests' fault."""


class EngineBroken(StepFailed):
    """Every further step fails; only a new process helps."""


class FeederFailed(StepFailed):
    """The step took its input from one that failed; nothing was computed, or it is of no use."""


class EngineThread:
    """Runs steps on `executor`'s thread; owns executor and thread."""

    def __init__(self, runner: Runner, executor: ThreadPoolExecutor) -> None:
        self.num_steps = 0
        """Steps that ended, failed ones included: a heartbeat that shows a stuck engine."""
        self.is_asynchronous = runner.is_asynchronous
        """Whether a step is launched long before it ends: a second one may be, whatever its seqs are."""
        self._runner = runner
        self._executor = executor
        self._collector = ThreadPoolExecutor(1, "tandem-collect") if runner.is_asynchronous else None
        self._previous: Launched | None = None  # for the engine thread alone
        self._last_loads = False  # whether the step launched last brings blocks in, which a later one may read
        self._last_failed = False  # for whoever collects: whether the step that ended before this one failed
        self._num_in_flight = 0
        self._num_failures = 0

    def launch(self, step: Step) -> asyncio.Future[StepResult]:
        """Prepares a step and hands it to the engine thread; the seqs' tables have been read when this returns.

        The result raises what the step raised, FeederFailed if it was fed by a step that failed, or EngineBroken: at
        once if the device or a rank is lost, else if `MAX_FAILURES` in a row failed or drew nothing but broken logits.
        It must not be cancelled: wait with `shell.thread_work.to_the_end`.
        Raises InternalError if two steps are in flight already.
        """
        if self._num_in_flight == MAX_IN_FLIGHT:
            raise InternalError(f"more than {MAX_IN_FLIGHT} steps in flight")
        loop = asyncio.get_running_loop()
        reads_loaded = self._num_in_flight > 0 and self._last_loads
        is_fed = reads_loaded or step.continues or (step.rows is not None and step.rows.feeds is not None)
        launched = _Launch(loop, loop.create_future(), is_fed)
        self._last_loads = any(move.direction is Direction.IN for move in step.moves)
        prepared: Prepared | Exception
        try:
            prepared = self._runner.prepare(step)
        except Exception as error:  # noqa: BLE001 - a step's root: whatever it is, the result raises it
            prepared = error
        self._executor.submit(self._step, launched, prepared)
        self._num_in_flight += 1
        return launched.ended

    def close(self) -> None:
        """Joins the threads, after the steps in flight if there are any. Idempotent."""
        self._executor.shutdown(wait=True)
        if self._collector is not None:
            self._collector.shutdown(wait=True)

    def _step(self, launch: _Launch, prepared: Prepared | Exception) -> None:
        """On the engine thread."""
        outcome: Launched | Exception
        try:
            if isinstance(prepared, Exception):
                raise prepared
            if launch.is_fed and self._previous is None:
                raise FeederFailed("a step is fed by one that failed")
            outcome = self._previous = self._runner.launch(prepared, self._previous)
        except Exception as error:  # noqa: BLE001 - a step's root
            outcome, self._previous = error, None
        if self._collector is None:  # nothing to wait for: the loop collects
            launch.loop.call_soon_threadsafe(lambda: self._resolve(launch, self._collect(launch, outcome)))
        else:
            self._collector.submit(self._collect_on_thread, launch, outcome)

    def _collect_on_thread(self, launch: _Launch, outcome: Launched | Exception) -> None:
        launch.loop.call_soon_threadsafe(self._resolve, launch, self._collect(launch, outcome))

    def _collect(self, launch: _Launch, outcome: Launched | Exception) -> StepResult | Exception:
        try:
            if isinstance(outcome, Exception):
                raise outcome
            result = self._runner.collect(outcome)
            if launch.is_fed and self._last_failed:
                raise FeederFailed("a step was fed by one that failed")
        except Exception as error:  # noqa: BLE001 - a step's root
            self._last_failed = True
            return error
        self._last_failed = False
        return result

    def _resolve(self, launch: _Launch, outcome: StepResult | Exception) -> None:
        """On the loop."""
        self._num_in_flight -= 1
        self.num_steps += 1
        self._count(launch, outcome)
        if isinstance(outcome, Exception) and is_lost(outcome):
            outcome = _broken("the device is lost to this process", outcome)
        elif isinstance(outcome, GroupBroken):
            outcome = _broken(f"the model's ranks are lost: {outcome}", outcome)
        elif self._num_failures >= MAX_FAILURES:
            outcome = _broken(f"{self._num_failures} steps in a row failed", outcome)
        if isinstance(outcome, StepResult):
            launch.ended.set_result(outcome)
        else:
            launch.ended.set_exception(outcome)

    def _count(self, launch: _Launch, outcome: StepResult | Exception) -> None:
        """A step that a failed one fed says nothing, and of logits nor does one without draws."""
        if isinstance(outcome, Exception):
            self._num_failures += not isinstance(outcome, FeederFailed)
            return
        token_ids = outcome.drawn.token_ids
        if any(token_id >= 0 for token_id in token_ids):
            self._num_failures = 0
        else:
            self._num_failures += bool(token_ids) and not launch.is_fed


def _broken(why: str, outcome: StepResult | Exception) -> EngineBroken:
    broken = EngineBroken(why)
    broken.__cause__ = outcome if isinstance(outcome, Exception) else None
    return broken


@dataclass(frozen=True, slots=True)
class _Launch:
    """Where a step's result goes."""

    loop: asyncio.AbstractEventLoop
    ended: asyncio.Future[StepResult]
    is_fed: bool
    """Whether the step takes tokens, KV or blocks from the step launched before."""
