"""What a caller without a token may take up on a port that asks for one. Bounds of gRPC itself: test_secure_server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shell.rpc import bounds, health
from shell.rpc.server import RpcServer
from tandem.rpc.channel import open_channel
from tandem.security.credentials import Incoming
from tandem.security.tokens import Tokens
from tests.pki import LOOPBACK, TOKEN, Pki

TIMEOUT_S = 30.0


@pytest.fixture
async def channel(tmp_path: Path) -> AsyncIterator[grpc.aio.Channel]:
    """To a server that asks for TOKEN."""
    server = RpcServer(f"{LOOPBACK}:0", [], incoming=Incoming(None, Tokens(Pki(tmp_path).tokens(TOKEN))), announce_s=0)
    async with AsyncExitStack() as stack:
        address = f"{LOOPBACK}:{await server.start()}"
        stack.push_async_callback(server.drain, 0)
        yield await stack.enter_async_context(open_channel(address))


def raw_call(channel: grpc.aio.Channel, method: str) -> grpc.aio.StreamStreamCall[bytes, bytes]:
    """A call whose messages are bytes and which ends when it is told to."""
    return channel.stream_stream(f"/{health.SERVICE_NAME}/{method}")(timeout=TIMEOUT_S)


@pytest.mark.parametrize("method", ["Check", "Watch"])
@pytest.mark.parametrize(
    ("messages", "said"),
    [([], "is missing"), ([b"\x0a\x00" * 600], "is longer than 1024 bytes"), ([b"\x0a\x01\xff"], "is not valid UTF-8")],
)
async def test_what_is_not_a_small_request_is_refused(
    channel: grpc.aio.Channel, method: str, messages: list[bytes], said: str
) -> None:
    call = raw_call(channel, method)
    for message in messages:
        await call.write(message)
    await call.done_writing()

    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert said in (await call.details() or "")


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_a_request_that_does_not_come_is_given_up(
    channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(bounds, "TOKENLESS_REQUEST_S", 0.2)

    assert await raw_call(channel, method).code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_calls_without_a_request_count_and_make_room_when_they_end(channel: grpc.aio.Channel) -> None:
    silent = [raw_call(channel, "Check") for _ in range(bounds.MAX_TOKENLESS_CALLS)]
    for call in silent:
        await call.wait_for_connection()
    stub = health_pb2_grpc.HealthStub(channel)

    assert await raw_call(channel, "Check").code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for call in silent:
        await call.done_writing()
        await call.code()
    assert (await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)).status


async def test_no_method_of_another_service_is_open_without_a_token(channel: grpc.aio.Channel) -> None:
    call = channel.unary_unary("/grpc.channelz.v1.Channelz/GetServers")(b"", timeout=TIMEOUT_S)
    assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
