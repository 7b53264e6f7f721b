from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shell.rpc.health import LIVENESS
from shell.rpc.server import RpcServer, Service
from tests.manual_clock import ManualClock
from tests.registering import BUSY, IDLE
from worker.serving.process import ProgressWatch

Serve = Callable[..., Awaitable[tuple[RpcServer, grpc.aio.Channel]]]

TIMEOUT_S = 20
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def watch(clock: ManualClock) -> ProgressWatch:
    return ProgressWatch(clock, stall_s=60)


def test_an_idle_engine_gets_on_for_ever(clock: ManualClock, watch: ProgressWatch) -> None:
    for _ in range(5):
        clock.advance_s(50)
        assert watch.observe(IDLE)


def test_an_engine_that_steps_gets_on(clock: ManualClock, watch: ProgressWatch) -> None:
    for steps in range(5):
        clock.advance_s(59)
        assert watch.observe(replace(BUSY, engine_steps=steps))


def test_an_engine_that_runs_sequences_without_a_step_stands_still(clock: ManualClock, watch: ProgressWatch) -> None:
    assert watch.observe(BUSY)
    clock.advance_s(59)
    assert watch.observe(BUSY)
    clock.advance_s(1)
    assert not watch.observe(BUSY)


def test_one_step_or_the_end_of_its_work_moves_it_again(clock: ManualClock, watch: ProgressWatch) -> None:
    for recovered in (replace(BUSY, engine_steps=8), IDLE):
        watch.observe(BUSY)
        clock.advance_s(61)
        assert not watch.observe(BUSY)
        assert watch.observe(recovered)


def test_a_long_idle_time_does_not_count_against_the_first_sequence(clock: ManualClock, watch: ProgressWatch) -> None:
    watch.observe(IDLE)
    clock.advance_s(1)
    assert watch.observe(IDLE)
    clock.advance_s(59)
    assert watch.observe(BUSY)


async def status(channel: grpc.aio.Channel, service: str) -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    return int((await health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S)).status)


async def test_life_and_readiness_are_told_apart(serve: Serve) -> None:
    server, channel = await serve()

    assert (await status(channel, LIVENESS), await status(channel, "")) == (SERVING, NOT_SERVING)
    server.set_serving(True)
    server.health.set_alive(False)
    assert (await status(channel, LIVENESS), await status(channel, "")) == (NOT_SERVING, SERVING)
    server.health.set_alive(True)
    assert await status(channel, LIVENESS) == SERVING


class Holding:
    """Stands for any service: `hold` runs until it may end."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()

    def service(self) -> Service:
        async def hold(request: bytes, context: object) -> bytes:
            self.begun.set()
            await self.may_end.wait()
            return request

        handlers = {"Hold": grpc.unary_unary_rpc_method_handler(hold)}
        handler = grpc.method_handlers_generic_handler("test.Holding", handlers)
        return Service("test.Holding", lambda server: server.add_generic_rpc_handlers((handler,)))


async def test_a_draining_process_is_not_ready_but_alive(serve: Serve) -> None:
    holding = Holding()
    server, channel = await serve(holding.service())
    server.set_serving(True)
    watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    call = channel.unary_unary("/test.Holding/Hold")(b"", timeout=TIMEOUT_S)
    await holding.begun.wait()
    assert (await watching.read()).status == SERVING

    draining = asyncio.create_task(server.drain(TIMEOUT_S))
    assert (await watching.read()).status == NOT_SERVING

    assert (server.health.alive, server.health.serving) == (True, False)
    holding.may_end.set()
    await call
    await draining
