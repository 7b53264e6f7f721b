"""The one thread that steps the model, seen from the control loop.

The loop awaits a step; the thread computes it. At most one step runs at a time, and `step`
never returns, not even cancelled, before the thread has let go of the batch: blocks of
scheduled seqs may be freed as soon as it has returned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from engine.placement import ThreadPlacement, open_engine_executor
from engine.step import Sampled, ScheduledSeq
from tandem.errors import InternalError

T = TypeVar("T")

MAX_FAILURES = 8
"""So many failed steps in a row are not the requests' fault: a GPU whose context is lost fails every one."""


class EngineBroken(InternalError):
    """No step ends well any more; only a new process helps."""


class Stepper(Protocol):
    """What the thread runs: the runner, or a fake."""

    def step(self, seqs: Sequence[ScheduledSeq]) -> Sequence[Sampled | None]:
        """Computes one step; one result per seq, None where nothing was sampled."""
        ...


class EngineThread:
    """Owns its executor: the one given, or one that it opens for `placement`."""

    def __init__(
        self,
        stepper: Stepper,
        placement: ThreadPlacement | None = None,
        executor: ThreadPoolExecutor | None = None,
    ) -> None:
        self._stepper = stepper
        self._executor = executor or open_engine_executor(placement or ThreadPlacement())
        self._num_steps = 0
        self._num_failures = 0
        self._is_stepping = False

    @property
    def num_steps(self) -> int:
        """Steps that ended, failed ones included: a heartbeat that shows a stuck engine."""
        return self._num_steps

    async def step(self, seqs: Sequence[ScheduledSeq]) -> Sequence[Sampled | None]:
        """Runs one step on the engine thread; raises what it raises, or EngineBroken if `MAX_FAILURES` in a row did.

        A cancelled caller gets CancelledError once the step has ended.
        """
        if self._is_stepping:
            raise InternalError("two steps at a time")
        self._is_stepping = True
        future = asyncio.get_running_loop().run_in_executor(self._executor, self._stepper.step, seqs)
        try:
            sampled = await to_the_end(future)
        except Exception as error:
            self._num_failures += 1
            if self._num_failures >= MAX_FAILURES:
                raise EngineBroken(f"{self._num_failures} steps in a row failed") from error
            raise
        finally:
            self._is_stepping = False
            self._num_steps += 1
        self._num_failures = 0
        return sampled

    def close(self) -> None:
        """Joins the thread, after its current step if there is one. Idempotent."""
        self._executor.shutdown(wait=True)


async def to_the_end(future: asyncio.Future[T]) -> T:
    """The result of work on a thread; a cancelled caller gets CancelledError, but only once the work has ended."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        future.exception()  # seen, so that asyncio does not report it as lost
        raise cancelled
    return future.result()
