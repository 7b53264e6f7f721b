"""Bytes to and from one peer over a connected socket: as they are, or inside TLS.

Owns no socket and no task, and sets no deadline of its own: `connection` does. One task reads and one writes; they may
be two. Errors are OSError, of which TimeoutError and ssl.SSLError are; the end of the stream is zero bytes, with or
without TLS's own goodbye, because the frames above say for themselves whether all was said.

To read never waits, and to wait never reads: a wait that is cut off, as by a deadline, takes no bytes with it.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

TURN_BYTES = 256 * 1024
"""Taken, encrypted or decrypted at a time (about 0.1 ms). After each the loop is to have its turn: sockets that are
ready never suspend a task."""


class Wire(Protocol):
    """A stream of bytes both ways."""

    def receive_now(self, view: memoryview) -> int | None:
        """Puts bytes that have come into `view` and says how many; 0 = none will, None = none yet. Raises OSError."""

    async def send_some(self, data: memoryview, within_s: float) -> int:
        """Waits until some of `data` has left, and says how many bytes. Raises OSError."""


class PlainWire:
    """The socket itself: payload is received straight into its blocks."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def receive_now(self, view: memoryview) -> int | None:
        """See `Wire`."""
        try:
            return self._sock.recv_into(view)
        except BlockingIOError:
            return None

    async def send_some(self, data: memoryview, within_s: float) -> int:
        """See `Wire`. A timeout costs more than a small send, so there is none until one has to wait."""
        with suppress(BlockingIOError):
            return self._sock.send(data)
        async with asyncio.timeout(within_s):
            while True:
                await writable(self._sock)
                with suppress(BlockingIOError):
                    return self._sock.send(data)


class TlsWire:
    """TLS over the socket; `shake_hands` comes before anything else.

    Only `send_some` and `shake_hands` put bytes on the socket, so that reader and writer never mix theirs.
    What TLS wants to answer while reading goes out with the next `send_some`.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, server_name: str | None) -> None:
        """`server_name` is what the server's certificate must bear; None on the server's own side."""
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_name is None, server_hostname=server_name
        )
        self._received = memoryview(bytearray(TURN_BYTES))

    async def shake_hands(self) -> None:
        """Shakes hands. Raises OSError after the peer was sent the reason, where TLS can carry one."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                while not self._fill():
                    await readable(self._sock)
            except ssl.SSLError:
                await self._flush()
                raise
            else:
                await self._flush()
                return

    def receive_now(self, view: memoryview) -> int | None:
        """See `Wire`. Takes as many records as have come and fit, `TURN_BYTES` of them at most."""
        view = view[:TURN_BYTES]
        filled = 0
        while filled < len(view):
            try:
                count = self._read_into(view[filled:])
            except ssl.SSLWantReadError:
                if filled:
                    break
                if not self._fill():
                    return None
                continue
            except ssl.SSLEOFError:
                break
            if count == 0:
                break
            filled += count
        return filled

    async def send_some(self, data: memoryview, within_s: float) -> int:
        """See `Wire`. As many records as `TURN_BYTES` take."""
        left = piece = data[:TURN_BYTES]
        while len(left):
            left = left[self._tls.write(left) :]  # one record at a time
        async with asyncio.timeout(within_s):
            await self._flush()
        return len(piece)

    def _read_into(self, view: memoryview) -> int:
        """What is left of one record, or as much of it as fits. 0 = TLS's goodbye. Raises ssl.SSLError."""
        count: Any = self._tls.read(len(view), view)
        return int(count)

    def _fill(self) -> bool:
        """False if nothing has come."""
        try:
            count = self._sock.recv_into(self._received)
        except BlockingIOError:
            return False
        if count:
            self._incoming.write(self._received[:count])
        else:
            self._incoming.write_eof()
        return True

    async def _flush(self) -> None:
        if self._outgoing.pending:
            await self._loop.sock_sendall(self._sock, self._outgoing.read())


async def readable(descriptor: socket.socket | int) -> None:
    """Returns once the descriptor can be read; the caller sets the deadline."""
    loop = asyncio.get_running_loop()
    await _called_back(descriptor, loop.add_reader, loop.remove_reader)


async def writable(sock: socket.socket) -> None:
    """Returns once the socket takes bytes; the caller sets the deadline."""
    loop = asyncio.get_running_loop()
    await _called_back(sock, loop.add_writer, loop.remove_writer)


async def _called_back(descriptor: Any, add: Callable[..., object], remove: Callable[[Any], object]) -> None:
    ready = asyncio.Event()
    add(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        remove(descriptor)


def reason(error: OSError) -> str:
    """What went wrong, in words and without the place in OpenSSL's source."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {(error.reason or 'protocol error').replace('_', ' ').lower()}"
    return error.strerror or type(error).__name__
