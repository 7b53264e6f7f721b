"""The admin port's front door: who is led where, and who is shown out."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tandem.admin.connection import HTTP2_PREFACE, Patience, Wire, recognize
from tandem.admin.front_door import FrontDoor
from tandem.admin.pipe import Pipe
from tandem.errors import ConfigError

TIMEOUT_S = 20.0
BRIEF_S = 0.05
FOREVER_S = 60.0
PATIENT = Patience(FOREVER_S, FOREVER_S, FOREVER_S, FOREVER_S)
GREETING = b"server speaks first"


async def until(condition: Callable[[], bool]) -> None:
    """Returns once plain state of both sides says so; there is no one event to wait on."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


class EchoHttp(asyncio.Protocol):
    """Stands in for HTTP: sends back what comes, in capitals."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data.upper())  # type: ignore[attr-defined]


class Caller:
    """One connection to the door."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def says(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def hears(self, num_bytes: int) -> bytes:
        async with asyncio.timeout(TIMEOUT_S):
            return await self.reader.readexactly(num_bytes)

    async def is_shown_out(self) -> bool:
        """Waits for the end of the connection; True if nothing was said before it."""
        async with asyncio.timeout(TIMEOUT_S):
            try:
                return await self.reader.read() == b""
            except ConnectionResetError:
                return True


class PrivateServer:
    """Stands in for gRPC behind the door: greets, then echoes."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.heard = b""
        self.writers: list[asyncio.StreamWriter] = []
        self.all_gone = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        writer.write(GREETING)
        while data := await reader.read(65536):
            self.heard += data
            writer.write(data)
            await writer.drain()
        writer.close()
        self.all_gone.set()


@pytest.fixture
async def private(tmp_path: Path) -> AsyncIterator[PrivateServer]:
    server = PrivateServer(str(tmp_path / "s"))
    listening = await asyncio.start_unix_server(server.serve, server.path)
    yield server
    listening.close()
    await listening.wait_closed()


OpenDoor = Callable[..., Awaitable[tuple[FrontDoor, Callable[[], Awaitable[Caller]]]]]


@pytest.fixture
async def open_door(private: PrivateServer) -> AsyncIterator[OpenDoor]:
    """`door, call = await open_door(...)`; afterwards no task and no connection may be left."""
    before = asyncio.all_tasks()
    doors: list[FrontDoor] = []
    callers: list[Caller] = []

    async def start(patience: Patience = PATIENT, path: str = private.path, max_connections: int = 8) -> object:
        door = FrontDoor(EchoHttp, path, patience=patience, max_connections=max_connections)
        port = await door.open("127.0.0.1:0")
        doors.append(door)

        async def call() -> Caller:
            callers.append(Caller(*await asyncio.open_connection("127.0.0.1", port)))
            return callers[-1]

        return door, call

    yield start  # type: ignore[misc]
    for door in doors:
        await door.close()
        assert not [task for task in asyncio.all_tasks() - before if task.get_name() == "admin-pipe"]
    for caller in callers:
        caller.writer.close()
    await until(lambda: not any(door.num_connections for door in doors))


@pytest.mark.parametrize("length", range(len(HTTP2_PREFACE)))
def test_a_beginning_of_the_preface_is_not_judged_yet(length: int) -> None:
    assert recognize(HTTP2_PREFACE[:length]) is None


@pytest.mark.parametrize("tail", [b"", b"\x00\x00\x12\x04"])
def test_the_whole_preface_is_http2(tail: bytes) -> None:
    assert recognize(HTTP2_PREFACE + tail) is Wire.HTTP2


@pytest.mark.parametrize(
    "first", [b"GET / HTTP/1.1\r\n", b"P", b"POST", b"PRI * HTTP/1.1\r\n", b"\x16\x03\x01", b"\x00"]
)
def test_anything_else_is_http1_from_the_byte_that_differs(first: bytes) -> None:
    assert (recognize(first) is Wire.HTTP1) == (not HTTP2_PREFACE.startswith(first))


async def test_http1_reaches_the_http_server_with_its_first_bytes(open_door: OpenDoor) -> None:
    _, call = await open_door()
    caller = await call()

    await caller.says(b"P")
    await caller.says(b"ut it there")

    assert await caller.hears(12) == b"PUT IT THERE"


@pytest.mark.parametrize("cut", [1, 10, len(HTTP2_PREFACE) - 1, len(HTTP2_PREFACE)])
async def test_http2_is_piped_both_ways_however_the_preface_is_cut(
    open_door: OpenDoor, private: PrivateServer, cut: int
) -> None:
    _, call = await open_door()
    caller = await call()
    said = HTTP2_PREFACE + b"frames"

    await caller.says(said[:cut])
    await caller.says(said[cut:])

    assert await caller.hears(len(GREETING) + len(said)) == GREETING + said
    assert private.heard == said


async def test_more_than_all_buffers_hold_arrives_whole(open_door: OpenDoor, private: PrivateServer) -> None:
    _, call = await open_door()
    caller = await call()
    said = HTTP2_PREFACE + bytes(range(256)) * 40_000  # 10 MB

    saying = asyncio.create_task(caller.says(said))

    assert await caller.hears(len(GREETING) + len(said)) == GREETING + said
    await saying


class RecordingTransport(asyncio.Transport):
    """Notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.told.append(f"write {bytes(data).decode()}")

    def pause_reading(self) -> None:
        self.told.append("pause")

    def resume_reading(self) -> None:
        self.told.append("resume")

    def is_closing(self) -> bool:
        return "close" in self.told

    def close(self) -> None:
        self.told.append("close")


def test_a_side_that_cannot_write_stops_the_other_from_being_read_until_it_can() -> None:
    other = RecordingTransport()
    pipe = Pipe(other)
    pipe.data_received(b"a")
    pipe.pause_writing()
    pipe.resume_writing()
    pipe.connection_lost(None)
    pipe.pause_writing()
    assert other.told == ["write a", "pause", "resume", "close"]


async def test_a_caller_that_leaves_ends_the_connection_behind(open_door: OpenDoor, private: PrivateServer) -> None:
    _, call = await open_door()
    caller = await call()
    await caller.says(HTTP2_PREFACE)
    await caller.hears(len(GREETING))

    caller.writer.close()

    await asyncio.wait_for(private.all_gone.wait(), TIMEOUT_S)


async def test_a_caller_is_told_when_the_private_server_ends(open_door: OpenDoor, private: PrivateServer) -> None:
    _, call = await open_door()
    caller = await call()
    await caller.says(HTTP2_PREFACE)
    await caller.hears(len(GREETING) + len(HTTP2_PREFACE))

    private.writers[0].close()

    assert await caller.is_shown_out()


async def test_a_caller_that_does_not_take_the_rest_is_cut_off(open_door: OpenDoor, private: PrivateServer) -> None:
    door, call = await open_door(Patience(FOREVER_S, FOREVER_S, FOREVER_S, flush_s=BRIEF_S))
    caller = await call()
    caller.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await caller.says(HTTP2_PREFACE)
    await until(lambda: bool(private.writers))
    private.writers[0].write(bytes(20_000_000))  # fills every buffer up to the caller

    private.writers[0].transport.abort()

    await until(lambda: door.num_connections == 0)


async def test_whoever_says_nothing_is_shown_out(open_door: OpenDoor) -> None:
    _, call = await open_door(Patience(BRIEF_S, FOREVER_S, FOREVER_S, FOREVER_S))
    assert await (await call()).is_shown_out()


async def test_half_a_preface_does_not_buy_time(open_door: OpenDoor) -> None:
    _, call = await open_door(Patience(BRIEF_S, FOREVER_S, FOREVER_S, FOREVER_S))
    caller = await call()
    await caller.says(HTTP2_PREFACE[:20])
    assert await caller.is_shown_out()


async def test_a_request_that_drips_in_is_cut_off(open_door: OpenDoor) -> None:
    door, call = await open_door(Patience(FOREVER_S, BRIEF_S, FOREVER_S, FOREVER_S))
    caller = await call()
    await caller.says(b"g")
    async with asyncio.timeout(TIMEOUT_S):
        while door.num_connections:  # each byte buys nothing
            caller.writer.write(b"e")
            await asyncio.sleep(0.001)


async def test_callers_beyond_the_bound_are_refused_and_make_room_when_they_leave(open_door: OpenDoor) -> None:
    door, call = await open_door(max_connections=2)
    first, second = await call(), await call()
    await first.says(b"a")
    await second.says(b"b")
    await first.hears(1)
    await second.hears(1)

    assert await (await call()).is_shown_out()
    first.writer.close()
    await until(lambda: door.num_connections == 1)
    third = await call()
    await third.says(b"c")

    assert await third.hears(1) == b"C"


async def test_many_who_are_refused_are_one_line_in_the_log(
    open_door: OpenDoor, caplog: pytest.LogCaptureFixture
) -> None:
    _, call = await open_door(max_connections=0)
    for _ in range(5):
        assert await (await call()).is_shown_out()
    assert [record.getMessage() for record in caplog.records] == ["admin port: too many connections; more are refused"]


async def test_callers_that_last_leave_room_for_those_that_do_not(open_door: OpenDoor) -> None:
    _, call = await open_door(max_connections=4)
    lasting = [await call() for _ in range(2)]
    for caller in lasting:
        await caller.says(HTTP2_PREFACE)
        await caller.hears(len(GREETING))
    refused, brief = await call(), await call()

    await refused.says(HTTP2_PREFACE)
    await brief.says(b"a")

    assert await refused.is_shown_out()
    assert await brief.hears(1) == b"A"


async def test_without_a_private_server_http2_is_refused(open_door: OpenDoor, tmp_path: Path) -> None:
    _, call = await open_door(path=str(tmp_path / "nobody"))
    caller = await call()
    await caller.says(HTTP2_PREFACE)
    assert await caller.is_shown_out()


async def test_closing_cuts_off_everybody(open_door: OpenDoor) -> None:
    door, call = await open_door()
    silent, http, http2 = await call(), await call(), await call()
    await http.says(b"a")
    await http.hears(1)
    await http2.says(HTTP2_PREFACE)
    await http2.hears(len(GREETING) + len(HTTP2_PREFACE))

    await door.close()

    assert [await each.is_shown_out() for each in (silent, http, http2)] == [True, True, True]


async def test_an_address_that_is_taken_is_named(private: PrivateServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"--admin-listen: cannot listen on {address}"):
            await FrontDoor(EchoHttp, private.path).open(address)
