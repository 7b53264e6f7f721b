"""A real server on a free loopback port with a channel to it, and spans kept in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import grpc.aio
import pytest

from shell.rpc.server import RpcServer, Service
from tandem.rpc.channel import open_channel
from tests.recorded_spans import RecordedSpans

Serve = Callable[..., Awaitable[tuple[RpcServer, grpc.aio.Channel]]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """`server, channel = await serve(service, ...)`; both are closed after the test."""
    async with AsyncExitStack() as stack:

        async def start(*services: Service) -> tuple[RpcServer, grpc.aio.Channel]:
            server = RpcServer("127.0.0.1:0", services, announce_s=0)
            port = await server.start()
            stack.push_async_callback(server.drain, 0)
            channel = open_channel(f"127.0.0.1:{port}")
            stack.push_async_callback(channel.close)
            return server, channel

        yield start


@pytest.fixture
def recorded() -> RecordedSpans:
    return RecordedSpans()
