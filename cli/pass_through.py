"""A gRPC port on loopback that passes calls on to a router, with TLS and the token that the router asks for.

For a program that speaks neither: whoever can call the port calls the named services with this process's rights. Bytes
go through as they are, both ways, with metadata, deadline, cancellation, status and its details. Runs in a thread of
its own, for as long as the process does.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
import grpc.aio

from shell.rpc.handlers import Context, Handler
from tandem.rpc.channel import keepalive_options, open_channel
from tandem.security.credentials import Outgoing
from tandem.security.tls import ClientPem

_HOST = "127.0.0.1"
_OWN_KEYS = frozenset({"authorization", "user-agent"})
"""Metadata that this process has of its own."""
_START_TIMEOUT_S = 30.0
_OLD_CHANNEL_S = 3600.0
"""Given to calls on a channel whose certificates have been replaced."""


class PassThrough(grpc.GenericRpcHandler):
    """Calls of some `services` to the router at `target`. Used on one event loop."""

    def __init__(self, target: str, services: frozenset[str], outgoing: Outgoing, max_receive_bytes: int) -> None:
        """`max_receive_bytes`: of a message, either way."""
        self._target = target
        self._services = services
        self._outgoing = outgoing
        self._max_receive_bytes = max_receive_bytes
        self._channel: grpc.aio.Channel | None = None
        self._pem: ClientPem | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def start(self) -> tuple[grpc.aio.Server, int]:
        """Listens on any free port."""
        limit = ("grpc.max_receive_message_length", self._max_receive_bytes)
        server = grpc.aio.server(options=[*keepalive_options(), limit, ("grpc.http2.max_ping_strikes", 0)])
        server.add_generic_rpc_handlers((self,))
        port = server.add_insecure_port(f"{_HOST}:0")
        await server.start()
        return server, port

    async def close(self) -> None:
        """Cuts what still runs."""
        if self._channel is not None:
            await self._channel.close()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """Any method of the services: on the wire one message is a stream of one. None = UNIMPLEMENTED."""
        method = handler_call_details.method
        if method.rpartition("/")[0].removeprefix("/") not in self._services:
            return None
        return grpc.stream_stream_rpc_method_handler(partial(self._pass, method))

    async def _pass(self, method: str, requests: AsyncIterator[bytes], context: Context) -> None:
        sent = tuple(pair for pair in context.invocation_metadata() or () if pair[0] not in _OWN_KEYS)
        begin: Any = self._connected().stream_stream(method)  # of bytes
        metadata = (*sent, *self._outgoing.metadata())
        call = begin(requests, timeout=context.time_remaining(), metadata=metadata)
        try:
            await context.send_initial_metadata(tuple(await call.initial_metadata()))
            async for message in call:
                await context.write(message)
            context.set_trailing_metadata(tuple(await call.trailing_metadata()))
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata()))
        finally:
            call.cancel()

    def _connected(self) -> grpc.aio.Channel:
        """Returns the channel, made with the present certificates."""
        pem = None if self._outgoing.tls is None else self._outgoing.tls.pem()
        if self._channel is None or pem is not self._pem:
            if self._channel is not None:
                closing = asyncio.create_task(self._channel.close(_OLD_CHANNEL_S), name="close-old-channel")
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
            self._channel = open_channel(self._target, self._outgoing, max_receive_bytes=self._max_receive_bytes)
            self._pem = pem
        return self._channel


def start_pass_through(target: str, services: frozenset[str], outgoing: Outgoing, max_receive_bytes: int) -> str:
    """Starts one in a thread; returns where it listens. Raises `queue.Empty` if it does not."""
    told: queue.SimpleQueue[int] = queue.SimpleQueue()

    async def run() -> None:
        server, port = await PassThrough(target, services, outgoing, max_receive_bytes).start()
        told.put(port)
        await server.wait_for_termination()

    threading.Thread(target=asyncio.run, args=(run(),), name="pass-through", daemon=True).start()
    return f"{_HOST}:{told.get(timeout=_START_TIMEOUT_S)}"
