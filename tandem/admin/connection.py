"""One connection to the admin port: which protocol it speaks, and how long it may take.

    SNIFFING ──HTTP/2's preface──▶ HTTP2  piped to the private gRPC server, for as long as both like
        └──────anything else─────▶ HTTP1  given to the HTTP server: one request, then it ends
    each ──closed, or out of time──▶ ENDED

It stays the transport's protocol throughout and hands what comes to `_inner`.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Protocol, cast

from tandem.admin.pipe import Pipe
from tandem.security.tls import HANDSHAKE_TIMEOUT_S
from tandem.telemetry.logging import get_logger

_log = get_logger(__name__)

HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""RFC 9113, 3.4: the first bytes of every HTTP/2 client."""


class Wire(enum.Enum):
    """What a connection speaks."""

    HTTP1 = enum.auto()
    HTTP2 = enum.auto()


def recognize(first: bytes) -> Wire | None:
    """From the first bytes of a connection; None = more are needed."""
    if not HTTP2_PREFACE.startswith(first[: len(HTTP2_PREFACE)]):
        return Wire.HTTP1
    return Wire.HTTP2 if len(first) >= len(HTTP2_PREFACE) else None


@dataclass(frozen=True, slots=True)
class Patience:
    """How long callers are borne with, in seconds."""

    sniff_s: float = 5.0
    """To say what is spoken."""
    http_s: float = 10.0
    """For one HTTP request and its answer, slow readers included."""
    dial_s: float = 5.0
    """To reach the private gRPC server."""
    flush_s: float = 5.0
    """To take what was left when the gRPC server closed."""
    handshake_s: float = HANDSHAKE_TIMEOUT_S
    """For TLS, before any of these."""


class Caller(Protocol):
    """Who has a place at the door: a Connection, or a Handshake before it."""

    def abort(self) -> None:
        """Ends it."""
        ...


class Doorman(Protocol):
    """Who counts connections and leads them on."""

    def enter(self, caller: Caller) -> bool:
        """Whether there is room for one more."""
        ...

    def stay(self, caller: Caller) -> bool:
        """Whether there is room for one more that may last: gRPC's do, HTTP's do not."""
        ...

    def leave(self, caller: Caller) -> None:
        """It has ended."""
        ...

    def http_handler(self) -> asyncio.Protocol:
        """What handles one HTTP/1 connection."""
        ...

    async def dial(self, protocol: asyncio.Protocol) -> asyncio.Transport:
        """A new connection to the private gRPC server. Raises OSError."""
        ...

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Runs it as a task that does not outlive the port."""
        ...


class Connection(asyncio.Protocol):
    """See the module."""

    def __init__(self, doorman: Doorman, patience: Patience) -> None:
        self._doorman = doorman
        self._patience = patience
        self._transport: asyncio.Transport | None = None
        self._first = bytearray()
        self._inner: asyncio.Protocol | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def abort(self) -> None:
        """Ends it at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the transport."""
        self._transport = cast(asyncio.Transport, transport)
        if not self._doorman.enter(self):
            self.abort()
            return
        self._allow(self._patience.sniff_s)

    def data_received(self, data: bytes) -> None:
        """Called by the transport."""
        if self._inner is not None:
            self._inner.data_received(data)
            return
        self._first += data
        match recognize(bytes(self._first)):
            case Wire.HTTP1:
                self._speak_http1()
            case Wire.HTTP2:
                self._speak_http2()
            case None:
                pass

    def eof_received(self) -> bool | None:
        """Called by the transport."""
        return None if self._inner is None else self._inner.eof_received()

    def pause_writing(self) -> None:
        """Called by the transport."""
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Called by the transport."""
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the transport, once, last."""
        self._allow(None)
        self._doorman.leave(self)
        inner, self._inner = self._inner, None
        if inner is not None:
            inner.connection_lost(error)

    def _speak_http1(self) -> None:
        assert self._transport is not None
        self._allow(self._patience.http_s)
        self._inner = self._doorman.http_handler()
        self._inner.connection_made(self._transport)
        self._inner.data_received(bytes(self._first))

    def _speak_http2(self) -> None:
        assert self._transport is not None
        if not self._doorman.stay(self):
            self.abort()
            return
        self._allow(self._patience.dial_s)
        self._transport.pause_reading()
        self._doorman.spawn(self._pipe(self._transport))

    async def _pipe(self, caller: asyncio.Transport) -> None:
        try:
            server = await self._doorman.dial(_ServerSide(caller, self._give_up_soon))
        except OSError as error:
            _log.warning("admin port: the private gRPC server cannot be reached", error=str(error))
            self.abort()
            return
        if caller.is_closing():
            server.abort()
            return
        self._allow(None)
        self._inner = Pipe(server)
        server.write(bytes(self._first))
        caller.resume_reading()

    def _give_up_soon(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._allow(self._patience.flush_s)

    def _allow(self, seconds: float | None) -> None:
        """From now on so long, then it is cut off; None = as long as it likes."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if seconds is not None:
            self._deadline = asyncio.get_running_loop().call_later(seconds, self.abort)


class _ServerSide(Pipe):
    """The way back from the private server; tells when that closes."""

    def __init__(self, caller: asyncio.Transport, on_lost: Callable[[], None]) -> None:
        super().__init__(caller)
        self._on_lost = on_lost

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the transport, once, last."""
        self._on_lost()
        super().connection_lost(error)
