"""A real server on a free loopback port with a channel to it, spans kept in memory, a checkpoint without weights."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from shell.rpc.server import RpcServer, Service
from tandem.rpc.channel import open_channel
from tests.recorded_spans import RecordedSpans

CONFIG = {"model_type": "llama", "vocab_size": 100, "max_position_embeddings": 64, "eos_token_id": 2}

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


@pytest.fixture
def write_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Writes config.json (with changes) and generation_config.json (if given); returns the folder."""

    def write(config: dict[str, Any] | None = None, generation: dict[str, Any] | None = None) -> Path:
        folder = tmp_path / "tiny"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(CONFIG | (config or {})))
        if generation is not None:
            (folder / "generation_config.json").write_text(json.dumps(generation))
        return folder

    return write
