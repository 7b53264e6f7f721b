"""Steps leave the loop, come back whole, and are never left running."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace

import pytest
import torch

from engine.draws import SampleSpec
from engine.engine_thread import MAX_FAILURES, EngineBroken, EngineThread, FeederFailed
from engine.loading import open_engine_executor
from engine.step import BrokenLogits, DecodeRows, Sampled, SampledToken, ScheduledSeq, Step, StepResult
from shell.thread_work import to_the_end
from tandem.errors import InternalError
from tandem.types import BlockId, SamplingParams, TokenId
from tests.token_engine import drawn_of

DEADLINE_S = 10.0
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="threads have their own settings on Linux")


class GatedRunner:
    """Each step says that it has begun, and ends when it is let; seqs' context lengths say what it does."""

    is_asynchronous = False

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self.events: list[str] = []
        self.thread_names: set[str] = set()
        self.draws: dict[int, tuple[Sampled, ...]] = {}
        """What a step brings, by its number."""
        self.error: Exception = InternalError("nothing to step")
        """What a bad step raises."""

    def prepare(self, step):
        if step is UNPREPARABLE:
            raise InternalError("cannot be laid out")
        return step

    def launch(self, prepared, previous):
        self.thread_names.add(threading.current_thread().name)
        self.events.append(f"launch {number(prepared)}")
        self.begun.set()
        assert self.may_end.wait(DEADLINE_S)
        if prepared is BAD:
            raise self.error
        return prepared

    def collect(self, launched):
        self.events.append(f"collect {number(launched)}")
        return StepResult((), 0.25, drawn=drawn_of([self.draws.get(number(launched), (TOKEN,))]))


def step_of(context_len: int, feeds: list[int] | None = None) -> Step:
    spec = SampleSpec(SamplingParams(max_tokens=1), 0)
    return Step((), rows=DecodeRows.of([ScheduledSeq((TokenId(1),), context_len, (BlockId(0),), (spec,))], feeds))


def number(step: Step) -> int:
    assert step.rows is not None
    return int(step.rows.context_lens[0])


TOKEN: Sampled = (SampledToken(TokenId(1), None),)
GOOD, BAD, UNPREPARABLE, FED = step_of(1), step_of(2), step_of(3), step_of(4, [0])


@pytest.fixture
def runner() -> GatedRunner:
    return GatedRunner()


@pytest.fixture
async def engine(runner: GatedRunner) -> AsyncIterator[EngineThread]:
    thread = EngineThread(runner, open_engine_executor())
    yield thread
    runner.may_end.set()
    thread.close()


async def begun(runner: GatedRunner) -> None:
    assert await asyncio.to_thread(runner.begun.wait, DEADLINE_S)


async def outcome(launched: Awaitable[StepResult]) -> StepResult | Exception:
    try:
        return await launched
    except InternalError as error:
        return error


async def test_the_loop_stays_free_while_a_step_runs(runner: GatedRunner, engine: EngineThread) -> None:
    launched = engine.launch(GOOD)
    await begun(runner)
    assert engine.num_steps == 0
    runner.may_end.set()
    assert (await launched).seconds == 0.25
    assert engine.num_steps == 1


async def test_every_step_runs_on_the_same_thread(runner: GatedRunner, engine: EngineThread) -> None:
    runner.may_end.set()
    for _ in range(5):
        await engine.launch(GOOD)
    assert len(runner.thread_names) == 1
    assert threading.current_thread().name not in runner.thread_names


@pytest.mark.parametrize(("bad", "why"), [(BAD, "nothing to step"), (UNPREPARABLE, "cannot be laid out")])
async def test_an_error_in_a_step_reaches_the_caller_and_the_next_step_runs(runner, engine, bad, why) -> None:
    runner.may_end.set()
    with pytest.raises(InternalError, match=why):
        await engine.launch(bad)
    assert isinstance(await engine.launch(GOOD), StepResult)
    assert engine.num_steps == 2


async def test_two_steps_may_be_in_flight_and_end_in_their_order(runner: GatedRunner, engine: EngineThread) -> None:
    first, second = engine.launch(GOOD), engine.launch(FED)
    with pytest.raises(InternalError, match="more than 2 steps"):
        engine.launch(GOOD)
    runner.may_end.set()
    await second
    assert engine.num_steps == 2
    await first
    await engine.launch(GOOD)
    assert [event for event in runner.events if "launch" in event] == ["launch 1", "launch 4", "launch 1"]
    assert [event for event in runner.events if "collect" in event] == ["collect 1", "collect 4", "collect 1"]


async def test_a_chunk_behind_one_that_failed_fails_unrun(runner, engine) -> None:
    runner.may_end.set()
    first, second = engine.launch(BAD), engine.launch(replace(GOOD, continues=True))
    assert type(await outcome(first)) is InternalError
    assert type(await outcome(second)) is FeederFailed
    assert "launch 1" not in runner.events


@pytest.mark.parametrize("bad", [BAD, UNPREPARABLE])
async def test_a_step_fed_by_one_that_failed_fails_unrun_and_one_that_is_not_runs(runner, engine, bad) -> None:
    runner.may_end.set()
    first, second = engine.launch(bad), engine.launch(FED)
    assert type(await outcome(first)) is InternalError
    assert type(await outcome(second)) is FeederFailed
    assert "launch 4" not in runner.events
    first, second = engine.launch(bad), engine.launch(GOOD)
    assert type(await outcome(first)) is InternalError
    assert isinstance(await second, StepResult)
    assert isinstance(await engine.launch(FED), StepResult)


async def test_a_cancelled_wait_ends_only_once_the_step_has(runner, engine) -> None:
    waiting = asyncio.create_task(to_the_end(engine.launch(GOOD)))
    await begun(runner)
    for _ in range(3):
        waiting.cancel()
        done, _ = await asyncio.wait({waiting}, timeout=0.01)
        assert not done
    runner.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert runner.events == ["launch 1", "collect 1"]
    assert isinstance(await engine.launch(GOOD), StepResult)


async def test_a_cancelled_step_that_fails_is_a_cancelled_step_and_no_lost_error(runner, engine) -> None:
    lost: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context))
    waiting = asyncio.create_task(to_the_end(engine.launch(BAD)))
    await begun(runner)
    waiting.cancel()
    runner.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    del waiting
    await engine.launch(GOOD)  # a turn of loop and thread, which lets go of the failed step
    gc.collect()
    assert lost == []


async def test_closing_joins_the_thread() -> None:
    runner = GatedRunner()
    runner.may_end.set()
    thread = EngineThread(runner, open_engine_executor())
    await thread.launch(GOOD)
    (name,) = runner.thread_names
    thread.close()
    thread.close()
    assert name not in {alive.name for alive in threading.enumerate()}


class DeviceRunner(GatedRunner):
    """A step goes on after its launch, until it is let end; `broken` ones fail then."""

    is_asynchronous = True

    def __init__(self) -> None:
        super().__init__()
        self.may_end.set()
        self.ends = {number: threading.Event() for number in range(5)}
        self.launched = {number: threading.Event() for number in range(5)}
        self.broken: set[int] = set()
        self.device_error = RuntimeError("the device broke")

    def launch(self, prepared, previous):
        launched = super().launch(prepared, previous)
        self.launched[number(prepared)].set()
        return launched

    def collect(self, launched):
        assert self.ends[number(launched)].wait(DEADLINE_S)
        if number(launched) in self.broken:
            self.events.append(f"failed {number(launched)}")
            raise self.device_error
        return super().collect(launched)


@pytest.fixture
async def device() -> AsyncIterator[tuple[DeviceRunner, EngineThread]]:
    runner = DeviceRunner()
    engine = EngineThread(runner, open_engine_executor())
    yield runner, engine
    for end in runner.ends.values():
        end.set()
    engine.close()


async def test_a_device_gets_the_next_step_while_it_computes_the_one_before(device) -> None:
    runner, engine = device
    first, second = engine.launch(GOOD), engine.launch(FED)
    assert await asyncio.to_thread(runner.launched[4].wait, DEADLINE_S)
    assert runner.events == ["launch 1", "launch 4"]
    runner.ends[4].set()  # not before the first: a device works in order, and so do we
    runner.ends[1].set()
    await first
    await second
    assert runner.events == ["launch 1", "launch 4", "collect 1", "collect 4"]


async def test_what_a_step_that_breaks_on_the_device_fed_is_of_no_use(device) -> None:
    runner, engine = device
    runner.broken.add(1)
    first, second = engine.launch(GOOD), engine.launch(FED)
    assert await asyncio.to_thread(runner.launched[4].wait, DEADLINE_S)
    for end in runner.ends.values():
        end.set()
    with pytest.raises(RuntimeError, match="broke"):
        await first
    assert type(await outcome(second)) is FeederFailed
    assert runner.events[-2:] == ["failed 1", "collect 4"]  # the second was waited for before its blocks may go
    runner.broken.clear()
    assert isinstance(await engine.launch(GOOD), StepResult)


async def test_a_launch_that_fails_is_told_after_the_steps_before_it(device) -> None:
    runner, engine = device
    first, second = engine.launch(GOOD), engine.launch(BAD)
    done, _ = await asyncio.wait({second}, timeout=0.01)
    assert not done
    runner.ends[1].set()
    await first
    with pytest.raises(InternalError, match="nothing to step"):
        await second


def test_threads_are_those_of_the_engine_alone() -> None:
    main = torch.get_num_threads()
    executor = open_engine_executor(threads=3)
    try:
        assert executor.submit(torch.get_num_threads).result() == 3
        assert torch.get_num_threads() == main
    finally:
        executor.shutdown()


async def failures(engine: EngineThread, count: int, *steps: Step) -> list[type]:
    return [type(await outcome(each)) for _ in range(count) for each in [engine.launch(step) for step in steps]]


BROKEN: tuple[Sampled, ...] = (BrokenLogits(),)
CHUNK = step_of(5)


@pytest.mark.parametrize(
    ("draws", "steps", "breaks"),
    [
        ({}, [BAD], True),
        ({}, [BAD, FED], True),  # a step that fails for want of its feed is no failure of its own
        ({1: BROKEN * 2}, [GOOD], True),
        ({1: (BrokenLogits(), TOKEN)}, [GOOD], False),
        ({1: BROKEN, 5: ()}, [GOOD, CHUNK], True),  # a step without draws says nothing of the logits
        ({1: BROKEN, 4: BROKEN}, [GOOD, FED], True),  # draws that were fed are the fault of the step before
    ],
)
async def test_as_many_failures_in_a_row_as_no_request_can_cause_say_that_the_engine_is_broken(
    runner, engine, draws, steps, breaks
) -> None:
    """Of steps that fail, and of those whose draws are all broken."""
    runner.may_end.set()
    runner.draws = draws
    assert EngineBroken not in await failures(engine, MAX_FAILURES - 1, *steps)
    assert (EngineBroken in await failures(engine, 1, *steps)) is breaks


async def test_one_good_step_among_failures_shows_that_the_engine_works(runner, engine) -> None:
    runner.may_end.set()
    for _ in range(3):
        assert EngineBroken not in await failures(engine, MAX_FAILURES - 1, BAD)
        await engine.launch(GOOD)


async def test_broken_draws_and_failed_steps_count_together(runner, engine) -> None:
    runner.may_end.set()
    runner.draws[1] = BROKEN
    assert EngineBroken not in await failures(engine, MAX_FAILURES // 2 - 1, GOOD, BAD)
    assert await failures(engine, 1, GOOD, BAD) == [StepResult, EngineBroken]


LOST = RuntimeError("CUDA error: an illegal memory access was encountered")


async def test_a_device_that_is_lost_at_a_launch_ends_the_engine_at_once(runner, engine) -> None:
    runner.may_end.set()
    runner.error = LOST
    with pytest.raises(EngineBroken, match="device is lost") as raised:
        await engine.launch(BAD)
    assert raised.value.__cause__ is LOST


async def test_a_device_that_is_lost_during_a_step_ends_the_engine_at_once(device) -> None:
    runner, engine = device
    runner.broken.add(1)
    runner.device_error = LOST
    for end in runner.ends.values():
        end.set()
    with pytest.raises(EngineBroken, match="device is lost"):
        await engine.launch(GOOD)
