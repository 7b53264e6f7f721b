from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from shell.rpc.server import RpcServer, Service
from tandem.errors import ConfigError, Overloaded
from tandem.rpc.channel import MAX_RECEIVE_BYTES
from tandem.v1 import inference_pb2, inference_pb2_grpc

Serve = Callable[..., Awaitable[tuple[RpcServer, grpc.aio.Channel]]]

NAME = "tandem.v1.InferenceService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
TIMEOUT_S = 20


class Streaming(inference_pb2_grpc.InferenceServiceServicer):
    """Streams until it is told to end; says when it has begun and how it ended."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self.released = asyncio.Event()

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        try:
            yield inference_pb2.GenerateResponse(text="first")
            self.begun.set()
            if request.text == "flood":
                while True:
                    yield inference_pb2.GenerateResponse(text="x" * 10_000)
            await self.may_end.wait()
            yield inference_pb2.GenerateResponse(text="last")
        finally:
            self.released.set()

    @property
    def service(self) -> Service:
        return Service(NAME, lambda server: inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, server))


async def check(channel: grpc.aio.Channel, name: str = "") -> int:
    response = await health_pb2_grpc.HealthStub(channel).Check(
        health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S
    )
    return int(response.status)


@pytest.mark.parametrize("name", ["", NAME])
async def test_health_tells_the_truth_of_the_moment(serve: Serve, name: str) -> None:
    server, channel = await serve(Streaming().service)

    assert await check(channel, name) == NOT_SERVING
    server.set_serving(True)
    assert await check(channel, name) == SERVING
    server.set_serving(False)
    assert await check(channel, name) == NOT_SERVING


async def test_an_unknown_service_has_no_health(serve: Serve) -> None:
    _, channel = await serve()

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await check(channel, "no.such.Service")
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="no.such.Service"))
    assert (await watch.read()).status == SERVICE_UNKNOWN
    watch.cancel()


async def test_a_watcher_sees_every_change_and_the_drain_and_then_its_end(serve: Serve) -> None:
    server, channel = await serve()
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)

    assert (await watch.read()).status == NOT_SERVING
    server.set_serving(True)
    assert (await watch.read()).status == SERVING
    draining = asyncio.create_task(server.drain(TIMEOUT_S))
    assert (await watch.read()).status == NOT_SERVING
    server.set_serving(True)
    assert await watch.read() is grpc.aio.EOF
    await draining


async def test_a_drain_ends_calls_that_outlast_the_grace_and_waits_for_their_cleanup(serve: Serve) -> None:
    streaming = Streaming()
    server, channel = await serve(streaming.service)
    call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest())
    await call.read()

    await server.drain(0)

    assert streaming.released.is_set()
    assert await call.code() is not grpc.StatusCode.OK


@pytest.mark.parametrize("text", ["", "flood"])
async def test_a_client_that_leaves_releases_the_handler_and_logs_no_error(
    serve: Serve, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    streaming = Streaming()
    _, channel = await serve(streaming.service)
    call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest(text=text))
    await call.read()

    call.cancel()

    await asyncio.wait_for(streaming.released.wait(), TIMEOUT_S)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_deadline_releases_the_handler(serve: Serve) -> None:
    streaming = Streaming()
    _, channel = await serve(streaming.service)
    call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest(), timeout=2.0)

    await asyncio.wait_for(streaming.released.wait(), TIMEOUT_S)
    assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_port_in_use_is_a_config_error(serve: Serve) -> None:
    server = RpcServer("127.0.0.1:0", [])
    port = await server.start()

    with pytest.raises(ConfigError) as refused:
        await RpcServer(f"127.0.0.1:{port}", []).start()

    assert refused.value.field == "--listen"
    await server.drain(0)


async def test_an_oversize_message_is_refused_and_the_next_call_served(serve: Serve) -> None:
    server, channel = await serve(Streaming().service)
    server.set_serving(True)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await inference_pb2_grpc.InferenceServiceStub(channel).Tokenize(
            inference_pb2.TokenizeRequest(text="x" * MAX_RECEIVE_BYTES), timeout=TIMEOUT_S
        )

    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await check(channel) == SERVING


@pytest.mark.parametrize(
    ("method", "request_bytes", "field"),
    [
        ("Tokenize", b"\x12\x02\xff\xfe", "text"),
        ("Tokenize", b"\x1a\x06\x0a\x04\x0a\x02\xff\xfe", "chat.messages.role"),
        ("Tokenize", b"\xff", "request"),
        ("Tokenize", b"\x12\x7fshort", "request"),
        ("Tokenize", b"\x12\x01\xff" + b"\x1a\x00" * 10_000, "request"),  # long
    ],
)
async def test_bytes_that_are_no_request_are_refused_by_field(
    serve: Serve, method: str, request_bytes: bytes, field: str
) -> None:
    _, channel = await serve(Streaming().service)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await channel.unary_unary(f"/{NAME}/{method}")(request_bytes, timeout=TIMEOUT_S)

    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (refused.value.details() or "").startswith(f"{field}:")


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_and_describes_every_service_itself_included(serve: Serve, version: str) -> None:
    _, channel = await serve(Streaming().service)
    call = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )(timeout=TIMEOUT_S)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services="*"))
    listed = [each.name for each in (await call.read()).list_services_response.service]

    assert listed == [
        "grpc.channelz.v1.Channelz",
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
        NAME,
    ]
    for name in listed:
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=name))
        assert (await call.read()).file_descriptor_response.file_descriptor_proto
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


class Holding:
    """What a handler holds when it refuses a call."""


async def test_nothing_that_a_refused_call_held_outlives_it(serve: Serve) -> None:
    held: list[weakref.ref[Holding]] = []

    class Refusing(inference_pb2_grpc.InferenceServiceServicer):
        async def Tokenize(  # noqa: N802
            self, request: inference_pb2.TokenizeRequest, context: object
        ) -> inference_pb2.TokenizeResponse:
            holding = Holding()
            held.append(weakref.ref(holding))
            raise Overloaded("later")

    service = Service(
        NAME, lambda server: inference_pb2_grpc.add_InferenceServiceServicer_to_server(Refusing(), server)
    )
    server, channel = await serve(service)
    with pytest.raises(grpc.aio.AioRpcError, match="later"):
        await inference_pb2_grpc.InferenceServiceStub(channel).Tokenize(inference_pb2.TokenizeRequest(text="a"))
    await server.drain(TIMEOUT_S)
    assert [each() for each in held] == [None]
