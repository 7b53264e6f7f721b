"""TLS at the front door, on both loops, for processes run on uvloop: silent callers count from the start."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tandem.admin.connection import Patience
from tandem.admin.front_door import FrontDoor
from tests.pki import LOOPBACK, Pki

TIMEOUT_S = 20.0
BRIEF_S = 0.05
FOREVER_S = 60.0
PATIENT = Patience(FOREVER_S, FOREVER_S, FOREVER_S, FOREVER_S, FOREVER_S)

Run = Callable[[Coroutine[Any, Any, None]], None]
on_either_loop = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    """One authority."""
    return Pki(tmp_path)


class EchoHttp(asyncio.Protocol):
    """Stands in for HTTP: sends back what comes, in capitals."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data.upper())  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Port:
    """A door that is open, with room for two."""

    door: FrontDoor
    number: int
    trusting: ssl.SSLContext

    async def has(self, num_connections: int) -> None:
        """Returns once the door counts so many; there is no event to wait on."""
        async with asyncio.timeout(TIMEOUT_S):
            while self.door.num_connections != num_connections:  # noqa: ASYNC110
                await asyncio.sleep(0)

    def silent(self) -> socket.socket:
        """A caller that says nothing."""
        return socket.create_connection((LOOPBACK, self.number), TIMEOUT_S)

    async def call(self, trusting: ssl.SSLContext | None = None) -> asyncio.StreamWriter:
        """A caller that is answered. Raises OSError or EOFError if it is not."""
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection(LOOPBACK, self.number, ssl=trusting or self.trusting)
            writer.write(b"hello")
            try:
                assert await reader.readexactly(5) == b"HELLO"
            except BaseException:
                writer.transport.abort()
                raise
        return writer


@asynccontextmanager
async def open_door(pki: Pki, patience: Patience = PATIENT, **tls: Any) -> AsyncIterator[Port]:
    """Afterwards nobody is there and no task is left."""
    identity = tls.pop("identity", None) or pki.issue()
    door = FrontDoor(EchoHttp, "nowhere", tls=pki.server(identity, **tls), max_connections=2, patience=patience)
    port = Port(door, await door.open(f"{LOOPBACK}:0"), pki.caller().context())
    try:
        yield port
    finally:
        await door.close()
        assert len(asyncio.all_tasks()) == 1
        await port.has(0)


async def is_refused(call: Awaitable[asyncio.StreamWriter]) -> bool:
    try:
        await call
    except TimeoutError:  # an OSError as well
        raise
    except (OSError, EOFError):
        return True
    return False


@on_either_loop
def test_who_has_not_shaken_hands_counts_and_makes_room_by_leaving(pki: Pki, run: Run) -> None:
    async def main() -> None:
        async with open_door(pki) as port:
            with port.silent() as first, port.silent():
                await port.has(2)
                assert await is_refused(port.call())

                first.close()
                await port.has(1)
                (await port.call()).close()

    run(main())


@on_either_loop
def test_many_silent_callers_hold_no_more_than_the_bound(pki: Pki, run: Run) -> None:
    async def main() -> None:
        async with open_door(pki) as port:
            callers = [port.silent() for _ in range(20)]
            for refused in callers[2:]:
                assert await asyncio.to_thread(is_shown_out, refused)
            assert port.door.num_connections == 2
            for each in callers:
                each.close()

    run(main())


def is_shown_out(caller: socket.socket) -> bool:
    try:
        return caller.recv(1) == b""
    except ConnectionResetError:
        return True


@on_either_loop
def test_a_silent_caller_is_cut_off_in_time(pki: Pki, run: Run) -> None:
    async def main() -> None:
        async with open_door(pki, Patience(handshake_s=BRIEF_S)) as port:
            with port.silent() as caller:
                assert await asyncio.to_thread(is_shown_out, caller)
                await port.has(0)

    run(main())


@on_either_loop
def test_a_caller_takes_one_place_from_first_to_last(pki: Pki, run: Run) -> None:
    async def main() -> None:
        async with open_door(pki) as port:
            for _ in range(3):
                with port.silent():
                    await port.has(1)
                    caller = await port.call()
                    assert port.door.num_connections == 2
                    caller.close()
                await port.has(0)

    run(main())


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00" + b"\xff" * 600])
@on_either_loop
def test_what_is_no_tls_is_refused_and_nothing_is_logged(
    pki: Pki, run: Run, said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with open_door(pki) as port:
            with port.silent() as caller:
                caller.sendall(said)
                await port.has(1)
                await port.has(0)

    run(main())
    assert [record for record in caplog.records if record.levelno >= logging.INFO] == []


@on_either_loop
def test_whom_the_authority_does_not_know_makes_room_again(pki: Pki, run: Run) -> None:
    async def main() -> None:
        async with open_door(pki, mutual=True) as port:
            for _ in range(3):
                assert await is_refused(port.call())
            await port.has(0)
            (await port.call(pki.caller(pki.issue()).context())).close()

    run(main())


@on_either_loop
def test_a_new_certificate_is_shown_from_the_next_handshake_on(pki: Pki, tmp_path: Path, run: Run) -> None:
    async def main() -> None:
        shown, other = pki.issue(), Pki(tmp_path, "other")
        async with open_door(pki, identity=shown) as port:
            (await port.call()).close()
            await port.has(0)
            shown.show(other.issue())

            assert await is_refused(port.call())
            await port.has(0)
            (await port.call(other.caller().context())).close()

    run(main())


@on_either_loop
def test_closing_cuts_off_those_who_shake_hands(pki: Pki, run: Run) -> None:
    async def main() -> None:
        async with open_door(pki) as port:
            with port.silent() as caller:
                await port.has(1)
                await port.door.close()
                assert await asyncio.to_thread(is_shown_out, caller)

    run(main())
