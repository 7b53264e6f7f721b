"""Bytes to and from one peer over a connected socket: as they are, or inside TLS.

Owns no socket, no deadline and no task: `connection` does. One task reads and one writes; they may be two.
Errors are OSError, of which ssl.SSLError is one; the end of the stream is zero bytes, with or without TLS's own
goodbye, because the frames above say for themselves whether all was said.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Any, Protocol

_PIECE_BYTES = 256 * 1024
"""Encrypted or decrypted at a time (about 0.1 ms); after each, the loop gets its turn."""


class Wire(Protocol):
    """A stream of bytes both ways."""

    async def receive_some(self, view: memoryview) -> int:
        """Puts at least one byte into `view` and says how many; 0 = nothing follows. Raises OSError."""
        ...

    async def send(self, data: memoryview) -> None:
        """Returns when `data` may be reused. Raises OSError."""
        ...


class PlainWire:
    """The socket itself: payload is received straight into its blocks."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()

    async def receive_some(self, view: memoryview) -> int:
        """See `Wire`."""
        return await self._loop.sock_recv_into(self._sock, view)

    async def send(self, data: memoryview) -> None:
        """See `Wire`."""
        await self._loop.sock_sendall(self._sock, data)


class TlsWire:
    """TLS over the socket; `shake_hands` comes before anything else.

    Only `send` and `shake_hands` put bytes on the socket, so that reader and writer never mix theirs.
    What TLS wants to answer while reading goes out with the next `send`.
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
        self._received = memoryview(bytearray(_PIECE_BYTES))
        self._since_pause_bytes = 0

    async def shake_hands(self) -> None:
        """Raises OSError; the peer has then been told why, where TLS has words for it."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                await self._fill()
            except ssl.SSLError:
                await self._flush()
                raise
            else:
                await self._flush()
                return

    async def receive_some(self, view: memoryview) -> int:
        """See `Wire`. Takes as many records as have come and fit."""
        filled = 0
        while filled < len(view):
            try:
                count = self._read_into(view[filled:])
            except ssl.SSLWantReadError:
                if filled:
                    break
                await self._fill()
                continue
            except ssl.SSLEOFError:
                break
            if count == 0:
                break
            filled += count
            await self._pause_after(count)
        return filled

    async def send(self, data: memoryview) -> None:
        """See `Wire`."""
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            while len(piece):
                piece = piece[self._tls.write(piece) :]  # one record at a time
            await self._flush()
            await self._pause_after(_PIECE_BYTES)

    def _read_into(self, view: memoryview) -> int:
        """What is left of one record, or as much of it as fits. 0 = TLS's goodbye. Raises ssl.SSLError."""
        count: Any = self._tls.read(len(view), view)
        return int(count)

    async def _fill(self) -> None:
        count = await self._loop.sock_recv_into(self._sock, self._received)
        if count:
            self._incoming.write(self._received[:count])
        else:
            self._incoming.write_eof()

    async def _flush(self) -> None:
        if self._outgoing.pending:
            await self._loop.sock_sendall(self._sock, self._outgoing.read())

    async def _pause_after(self, num_bytes: int) -> None:
        """Sockets that are ready never suspend a task, and encryption takes time: lets others run now and then."""
        self._since_pause_bytes += num_bytes
        if self._since_pause_bytes >= _PIECE_BYTES:
            self._since_pause_bytes = 0
            await asyncio.sleep(0)


def reason(error: OSError) -> str:
    """What went wrong, in words and without the place in OpenSSL's source."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {(error.reason or 'protocol error').replace('_', ' ').lower()}"
    return error.strerror or type(error).__name__
