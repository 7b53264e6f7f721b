from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shell.config import DecodeConfig
from shell.rpc.health import LIVENESS
from shell.rpc.process import StopSignal
from shell.telemetry.metric import Process
from shell.telemetry.metrics import Metrics
from tandem.rpc.channel import open_channel
from tandem.types import WorkerInfo, WorkerLoad, new_incarnation
from tandem.v1 import registry_pb2
from tests.fake_registry import Registry, listen
from tests.manual_clock import ManualClock
from tests.registering import BUSY, IDLE, INFO
from worker.serving.process import ProgressWatch, WorkerProcess

TIMEOUT_S = 20
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class FakeCore:
    """A worker whose load the test sets."""

    def __init__(self) -> None:
        self.now = IDLE

    async def run(self) -> None:
        await asyncio.Event().wait()

    def drain(self) -> None:
        self.now = replace(self.now, draining=True)

    async def drained(self) -> None:
        return None

    def load(self) -> WorkerLoad:
        return self.now


@asynccontextmanager
async def worker_process(
    core: FakeCore, registry: Registry, progress: ProgressWatch | None = None
) -> AsyncIterator[grpc.aio.Channel]:
    """A worker of one router, and a channel to it."""
    router, port = await listen(registry)
    process = WorkerProcess(
        DecodeConfig(router=(f"127.0.0.1:{port}",)),
        core,  # type: ignore[arg-type]  # no router connects
        new_incarnation(),
        Metrics(Process("decode"), "demo"),
        progress=progress,
        watch_every_s=0.001,
    )
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def describe(bound: str) -> WorkerInfo:
        address.set_result(bound)
        return replace(INFO, address=bound)

    stop = StopSignal()
    running = asyncio.create_task(process.run(describe, stop))
    async with open_channel(await address) as channel:
        yield channel
    stop.requested.set()
    await running
    await router.drain(0)


async def status(channel: grpc.aio.Channel, name: str = "") -> int:
    response = await health_pb2_grpc.HealthStub(channel).Check(
        health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S
    )
    return int(response.status)


def watch(channel: grpc.aio.Channel, name: str = "") -> grpc.aio.UnaryStreamCall[Any, Any]:
    return health_pb2_grpc.HealthStub(channel).Watch(  # type: ignore[no-any-return]
        health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S
    )


async def test_a_worker_is_ready_once_a_router_has_taken_it_in() -> None:
    registry = Registry()
    registry.answers, takes_in = [], registry.answers
    registry.hang_up.set()
    async with worker_process(FakeCore(), registry) as channel:
        watching = watch(channel)
        assert (await watching.read()).status == NOT_SERVING
        await asyncio.wait_for(registry.hung_up.wait(), TIMEOUT_S)
        assert await status(channel) == NOT_SERVING

        registry.answers = takes_in
        assert (await watching.read()).status == SERVING


async def test_a_worker_that_drains_is_not_ready_wherever_it_registers() -> None:
    registry = Registry()
    registry.answers = [registry_pb2.RegisterResponse(lease_seconds=1.5, drain=True)]
    core = FakeCore()
    async with worker_process(core, registry) as channel:
        assert (await registry.hear()).HasField("info")
        registry.hang_up.set()
        while not (await registry.hear()).HasField("info"):
            pass
        for _ in range(2):  # the second heartbeat comes after the answer
            assert (await registry.hear()).HasField("load")

        assert core.now.draining
        assert await status(channel) == NOT_SERVING


async def test_a_worker_whose_engine_stands_still_is_not_alive_until_it_moves() -> None:
    core, clock = FakeCore(), ManualClock()
    async with worker_process(core, Registry(), ProgressWatch(clock, stall_s=60)) as channel:
        ready = watch(channel)
        while (await ready.read()).status != SERVING:
            pass
        watching = watch(channel, LIVENESS)
        assert (await watching.read()).status == SERVING

        core.now = BUSY
        clock.advance_s(61)
        assert (await watching.read()).status == NOT_SERVING
        assert await status(channel) == SERVING

        core.now = replace(BUSY, engine_steps=8)
        assert (await watching.read()).status == SERVING


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def progress(clock: ManualClock) -> ProgressWatch:
    return ProgressWatch(clock, stall_s=60)


def test_an_engine_gets_on_while_it_is_idle_or_steps(clock: ManualClock, progress: ProgressWatch) -> None:
    for each in (*[IDLE] * 3, *(replace(BUSY, engine_steps=steps) for steps in range(3)), IDLE, BUSY):
        clock.advance_s(59)
        assert progress.observe(each)


def test_an_engine_that_runs_sequences_without_a_step_stands_still(clock: ManualClock, progress: ProgressWatch) -> None:
    for recovered in (replace(BUSY, engine_steps=8), IDLE):
        assert progress.observe(BUSY)
        clock.advance_s(59)
        assert progress.observe(BUSY)
        clock.advance_s(1)
        assert not progress.observe(BUSY)
        assert progress.observe(recovered), "one step, or the end of its work, moves it again"
