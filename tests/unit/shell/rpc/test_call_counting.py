"""What is told of each gRPC call: that it came, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from shell.rpc.interceptors import CallGuard
from shell.rpc.observing import CallObserving
from shell.telemetry import metric_names
from shell.telemetry.metric import Process
from shell.telemetry.metrics import Metrics
from tandem.errors import DeadlineExceeded, InvalidRequest
from tandem.v1 import inference_pb2, inference_pb2_grpc

TIMEOUT_S = 20
SERVICE = "/tandem.v1.InferenceService"


class Told:
    """What the metrics say of calls."""

    def __init__(self) -> None:
        self.metrics = Metrics(Process.ROUTER, "demo")

    @property
    def calls(self) -> list[tuple[str, str]]:
        counted = self.metrics.counter(metric_names.GRPC_CALLS)
        return [
            (f"/{service}/{method}".removeprefix(SERVICE), code)
            for (service, method, code), count in counted.items()
            for _ in range(int(count))
        ]

    @property
    def running(self) -> list[str]:
        lines = self.metrics.exposition()[0].decode().splitlines()
        found = [re.fullmatch(r'tandem_grpc_\w+_in_flight{method="(.*)",service="(.*)"} 1.0', line) for line in lines]
        return [f"/{each[2]}/{each[1]}" for each in found if each]

    async def end_of_one(self) -> None:
        """A caller may know the status before the handler has left."""
        async with asyncio.timeout(TIMEOUT_S):
            while not self.calls:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


class Servicer(inference_pb2_grpc.InferenceServiceServicer):
    """Answers, refuses, breaks or hangs, as the text says."""

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        yield inference_pb2.GenerateResponse(text="first")
        if request.text == "hang":
            await asyncio.Event().wait()
        if request.text == "break":
            raise ZeroDivisionError

    async def GetModel(self, request: inference_pb2.GetModelRequest, context: Any) -> inference_pb2.GetModelResponse:  # noqa: N802
        if request.model == "bad":
            raise InvalidRequest("model", "is bad")
        if request.model == "late":
            time.sleep(1.5 * context.time_remaining())  # noqa: ASYNC251  (the call ends, and the loop has yet to hear)
            raise DeadlineExceeded("found by the handler itself")
        if request.model == "abort":
            await context.abort(grpc.StatusCode.ABORTED, "no")
        return inference_pb2.GetModelResponse()


Serve = Callable[..., Awaitable[tuple[Told, grpc.aio.Channel]]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts a server whose calls are counted."""
    async with asyncio.timeout(60):
        running: list[tuple[grpc.aio.Server, grpc.aio.Channel]] = []

        async def start() -> Any:
            told = Told()
            server = grpc.aio.server(interceptors=(CallObserving(told.metrics), CallGuard(frozenset())))
            inference_pb2_grpc.add_InferenceServiceServicer_to_server(Servicer(), server)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
            running.append((server, channel))
            return told, channel

        yield start
        for server, channel in running:
            await channel.close()
            await server.stop(0)


@pytest.mark.parametrize(
    ("model", "code"), [("", "OK"), ("bad", "INVALID_ARGUMENT"), ("abort", "ABORTED")], ids=["fine", "error", "abort"]
)
async def test_a_unary_call_ends_with_its_status(serve: Serve, model: str, code: str) -> None:
    told, channel = await serve()
    call = inference_pb2_grpc.InferenceServiceStub(channel).GetModel(
        inference_pb2.GetModelRequest(model=model), timeout=TIMEOUT_S
    )
    assert (await call.code()).name == code
    await told.end_of_one()
    assert (told.calls, told.running) == ([("/GetModel", code)], [])


@pytest.mark.parametrize(("text", "code"), [("", "OK"), ("break", "INTERNAL")])
async def test_a_stream_ends_with_its_status(serve: Serve, text: str, code: str) -> None:
    told, channel = await serve()
    call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(
        inference_pb2.GenerateRequest(text=text), timeout=TIMEOUT_S
    )
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    assert (await call.code()).name == code
    await told.end_of_one()
    assert (told.calls, told.running) == ([("/Generate", code)], [])


async def test_a_stream_that_runs_is_in_flight_and_one_that_its_caller_leaves_is_cancelled(serve: Serve) -> None:
    told, channel = await serve()
    call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(
        inference_pb2.GenerateRequest(text="hang"), timeout=TIMEOUT_S
    )
    await call.read()
    assert (told.calls, told.running) == ([], [f"{SERVICE}/Generate"])
    call.cancel()
    await told.end_of_one()
    assert (told.calls, told.running) == ([("/Generate", "CANCELLED")], [])


async def test_a_call_past_its_deadline_is_counted_as_that(serve: Serve) -> None:
    told, channel = await serve()
    await channel.channel_ready()  # else a slow connection takes the time, and no handler hears of the call
    call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(
        inference_pb2.GenerateRequest(text="hang"), timeout=2.0
    )
    assert (await call.code()).name == "DEADLINE_EXCEEDED"
    await told.end_of_one()
    assert (told.calls, told.running) == ([("/Generate", "DEADLINE_EXCEEDED")], [])


async def test_an_error_that_comes_after_the_call_is_over_is_no_bug_of_the_handler(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    told, channel = await serve()
    await channel.channel_ready()
    call = inference_pb2_grpc.InferenceServiceStub(channel).GetModel(
        inference_pb2.GetModelRequest(model="late"), timeout=2.0
    )
    assert (await call.code()).name == "DEADLINE_EXCEEDED"
    await told.end_of_one()
    assert (told.calls, told.running) == ([("/GetModel", "DEADLINE_EXCEEDED")], [])
    assert not caplog.records
