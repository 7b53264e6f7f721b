"""Steps leave the loop, come back whole, and are never left running."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
from collections.abc import AsyncIterator, Sequence

import pytest
import torch

from engine.engine_thread import MAX_FAILURES, EngineBroken, EngineThread
from engine.placement import ThreadPlacement, open_engine_executor
from engine.step import SampledToken, ScheduledSeq
from tandem.errors import InternalError

DEADLINE_S = 10.0
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="threads have their own settings on Linux")


class GatedStepper:
    """Each step says that it has begun, and ends when it is let."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self.ended = 0
        self.thread_names: set[str] = set()

    def step(self, seqs: Sequence[ScheduledSeq]) -> list[SampledToken | None]:
        self.thread_names.add(threading.current_thread().name)
        self.begun.set()
        assert self.may_end.wait(DEADLINE_S)
        self.ended += 1
        if not seqs:
            raise InternalError("nothing to step")
        return [None] * len(seqs)


SEQS = (ScheduledSeq((), 0, (), None),)


@pytest.fixture
def stepper() -> GatedStepper:
    return GatedStepper()


@pytest.fixture
async def engine(stepper: GatedStepper) -> AsyncIterator[EngineThread]:
    thread = EngineThread(stepper)
    yield thread
    stepper.may_end.set()
    thread.close()


async def begun(stepper: GatedStepper) -> None:
    assert await asyncio.to_thread(stepper.begun.wait, DEADLINE_S)


async def test_the_loop_stays_free_while_a_step_runs(stepper: GatedStepper, engine: EngineThread) -> None:
    step = asyncio.create_task(engine.step(SEQS))
    await begun(stepper)
    assert engine.num_steps == 0
    stepper.may_end.set()
    assert await step == [None]
    assert engine.num_steps == 1


async def test_every_step_runs_on_the_same_thread(stepper: GatedStepper, engine: EngineThread) -> None:
    stepper.may_end.set()
    for _ in range(5):
        await engine.step(SEQS)
    assert len(stepper.thread_names) == 1
    assert threading.current_thread().name not in stepper.thread_names


async def test_an_error_in_a_step_reaches_the_caller_and_the_next_step_runs(stepper, engine) -> None:
    stepper.may_end.set()
    with pytest.raises(InternalError, match="nothing to step"):
        await engine.step(())
    assert await engine.step(SEQS) == [None]
    assert engine.num_steps == 2


async def test_two_steps_at_a_time_are_refused(stepper: GatedStepper, engine: EngineThread) -> None:
    step = asyncio.create_task(engine.step(SEQS))
    await begun(stepper)
    with pytest.raises(InternalError, match="two steps"):
        await engine.step(SEQS)
    stepper.may_end.set()
    await step


async def test_a_cancelled_step_returns_only_once_the_thread_has_let_go(stepper, engine) -> None:
    step = asyncio.create_task(engine.step(SEQS))
    await begun(stepper)
    for _ in range(3):
        step.cancel()
        done, _ = await asyncio.wait({step}, timeout=0.01)
        assert not done
    stepper.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert stepper.ended == 1
    assert await engine.step(SEQS) == [None]


async def test_a_cancelled_step_that_fails_is_a_cancelled_step_and_no_lost_error(stepper, engine) -> None:
    lost: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context))
    step = asyncio.create_task(engine.step(()))
    await begun(stepper)
    step.cancel()
    stepper.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await step
    del step
    await engine.step(SEQS)  # a turn of loop and thread, which lets go of the failed step
    gc.collect()
    assert lost == []


async def test_closing_joins_the_thread() -> None:
    stepper = GatedStepper()
    stepper.may_end.set()
    thread = EngineThread(stepper)
    await thread.step(SEQS)
    (name,) = stepper.thread_names
    thread.close()
    thread.close()
    assert name not in {alive.name for alive in threading.enumerate()}


@linux_only
def test_a_placement_holds_on_the_engine_thread_only() -> None:
    cpu = min(os.sched_getaffinity(0))
    main = (torch.get_num_threads(), os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0))
    executor = open_engine_executor(ThreadPlacement(threads=3, cpus=frozenset({cpu}), nice=7))
    try:
        assert executor.submit(torch.get_num_threads).result() == 3
        assert executor.submit(os.sched_getaffinity, 0).result() == {cpu}
        assert executor.submit(os.getpriority, os.PRIO_PROCESS, 0).result() == 7
        assert (torch.get_num_threads(), os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)) == main
    finally:
        executor.shutdown()


@linux_only
def test_a_placement_that_the_system_refuses_is_an_error() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        open_engine_executor(ThreadPlacement(cpus=frozenset({4000})))


async def fail_once(engine: EngineThread) -> InternalError:
    with pytest.raises(InternalError) as caught:
        await engine.step(())
    return caught.value


async def test_as_many_failures_in_a_row_as_no_request_can_cause_say_that_the_engine_is_broken(stepper, engine) -> None:
    stepper.may_end.set()

    errors = [await fail_once(engine) for _ in range(MAX_FAILURES)]

    assert [type(error) for error in errors] == [InternalError] * (MAX_FAILURES - 1) + [EngineBroken]


async def test_one_good_step_among_failures_shows_that_the_engine_works(stepper, engine) -> None:
    stepper.may_end.set()
    for _ in range(3):
        errors = [await fail_once(engine) for _ in range(MAX_FAILURES - 1)]
        await engine.step(SEQS)

        assert EngineBroken not in map(type, errors)
