"""What anybody may ask of health, and what that must not cost."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.rpc import health
from tandem.rpc.server import RpcServer

Serve = Callable[..., Awaitable[tuple[RpcServer, grpc.aio.Channel]]]

TIMEOUT_S = 30
NEVER_S = 3600.0
DATA, HEADERS, SETTINGS, PING = 0, 1, 4, 6
ACK = END_STREAM = 1
END_HEADERS = 4


def raw_call(channel: grpc.aio.Channel, method: str) -> grpc.aio.StreamStreamCall[bytes, bytes]:
    """A call whose messages are bytes and which ends when it is told to."""
    return channel.stream_stream(f"/{health.SERVICE_NAME}/{method}")(timeout=TIMEOUT_S)


async def check(channel: grpc.aio.Channel) -> bool:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    return bool(answer.status)


@pytest.mark.parametrize("method", ["Check", "Watch"])
@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "is missing"),
        ([b"\x0a\x00" * 600], "is longer than 1024 bytes"),
        ([b"", b""], "is more than one message"),
        ([b"\x0a\x01\xff"], "is not valid UTF-8"),
    ],
)
async def test_what_is_not_one_small_request_is_refused(
    serve: Serve, method: str, messages: list[bytes], said: str
) -> None:
    _, channel = await serve()
    call = raw_call(channel, method)
    for message in messages:
        await call.write(message)
    await call.done_writing()

    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert said in (await call.details() or "")


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_a_request_that_does_not_end_is_given_up(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(health, "_LONGEST_S", 0.5)
    _, channel = await serve()
    call = raw_call(channel, method)
    await call.write(b"")

    assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert await call.details() == "the caller took too long"


async def test_who_never_asks_keeps_nobody_from_asking(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_LONGEST_S", NEVER_S)
    monkeypatch.setattr(health, "_SEATS", 2)
    _, channel = await serve()
    silent = [asyncio.ensure_future(raw_call(channel, "Check").code()) for _ in range(6)]
    async with asyncio.timeout(TIMEOUT_S):
        done: set[asyncio.Future[grpc.StatusCode]] = set()
        waiting = set(silent)
        while len(done) < 4:
            ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            done |= ended

    assert {task.result() for task in done} == {grpc.StatusCode.DEADLINE_EXCEEDED}
    for _ in range(3):
        assert await check(channel)
    for task in waiting:
        task.cancel()


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


async def test_a_watcher_that_takes_no_answer_does_not_hold_up_the_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_LONGEST_S", NEVER_S)
    server = RpcServer("127.0.0.1:0", [], announce_s=0)
    port = await server.start()
    async with asyncio.timeout(TIMEOUT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        answered = asyncio.Event()
        staying = asyncio.create_task(answer_pings(reader, writer, answered))
        writer.write(watch_with_a_closed_window())
        await answered.wait()

        await server.drain(NEVER_S)

    await staying
    writer.close()
