"""Watchers of health: all are told, and none holds up the others."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Awaitable, Callable

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shell.rpc import health
from shell.rpc.server import RpcServer
from tandem.rpc.channel import open_channel

Serve = Callable[..., Awaitable[tuple[RpcServer, grpc.aio.Channel]]]

TIMEOUT_S = 30
NEVER_S = 3600.0
DATA, HEADERS, SETTINGS, PING = 0, 1, 4, 6
ACK = END_STREAM = 1
END_HEADERS = 4


async def test_every_watcher_hears_of_a_change_though_another_has_left(serve: Serve) -> None:
    server, channel = await serve()
    stub = health_pb2_grpc.HealthStub(channel)
    leaving, staying = (stub.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S) for _ in range(2))
    for watch in (leaving, staying):
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    leaving.cancel()

    server.set_serving(True)

    assert (await staying.read()).status == health_pb2.HealthCheckResponse.SERVING


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Of HTTP/2 (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def watch_with_a_closed_window() -> bytes:
    """What a client sends that watches and lets the server send nothing."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/{health.SERVICE_NAME}/Watch",
        ":authority": "test",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    literal = b"".join(
        b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )
    initial_window_size = struct.pack(">HI", 4, 0)
    return (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + frame(SETTINGS, 0, 0, initial_window_size)
        + frame(HEADERS, END_HEADERS, 1, literal)
        + frame(DATA, END_STREAM, 1, struct.pack(">BI", 0, 0))
    )


async def answer_pings(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answered: asyncio.Event) -> None:
    """Keeps the connection alive to its end; sets `answered` once the head of an answer has come."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readexactly(9)
            payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
            kind, flags = head[3], head[4]
            if kind == PING and not flags & ACK:
                writer.write(frame(PING, ACK, 0, payload))
            elif kind == HEADERS:
                answered.set()


async def test_a_watcher_that_takes_no_answer_holds_up_neither_a_change_nor_the_drain() -> None:
    server = RpcServer("127.0.0.1:0", [], announce_s=0)
    port = await server.start()
    async with asyncio.timeout(TIMEOUT_S), open_channel(f"127.0.0.1:{port}") as channel:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        answered = asyncio.Event()
        staying = asyncio.create_task(answer_pings(reader, writer, answered))
        writer.write(watch_with_a_closed_window())
        await answered.wait()

        server.set_serving(True)
        check = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert check.status == health_pb2.HealthCheckResponse.SERVING
        await server.drain(NEVER_S)

    await staying
    writer.close()
