"""TLS of one connection to the admin port. It takes its place before, so that silent callers are counted, too.

    plain transport ──its socket taken over──▶ HANDSHAKE ──done──▶ the Connection has transport and place
        └──────────no room──────────▶ ENDED ◀──failed, out of time──┘

Not the loop's own TLS server, which tells of callers only once they have shaken hands; nor `start_tls`: under
uvloop, a transport cannot be kept from reading before that begins, and what it reads is lost to TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import cast

from tandem.admin.connection import Connection, Doorman


class Handshake(asyncio.Protocol):
    """First the protocol of a plain transport, then that of one with TLS, at last of none."""

    def __init__(self, doorman: Doorman, connection: Connection, context: ssl.SSLContext, timeout_s: float) -> None:
        """`connection` is for the caller who passes."""
        self._doorman = doorman
        self._connection = connection
        self._context = context
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None

    def abort(self) -> None:
        """Ends it soon: the loop, which owns the socket, will find it closed by the caller."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by either transport."""
        transport = cast(asyncio.Transport, transport)
        if self._socket is None:
            self._begin(transport)
        else:
            self._doorman.leave(self)
            transport.set_protocol(self._connection)
            self._connection.connection_made(transport)

    def _begin(self, plain: asyncio.Transport) -> None:
        if self._doorman.enter(self):
            try:
                self._socket = plain.get_extra_info("socket").dup()
                self._doorman.spawn(self._shake_hands(self._socket))
            except OSError:  # no descriptor is left
                self._doorman.leave(self)
        plain.abort()  # has read nothing yet

    async def _shake_hands(self, taken: socket.socket) -> None:
        connect = asyncio.get_running_loop().connect_accepted_socket
        try:
            with contextlib.suppress(OSError):  # TLS' own errors and timeouts are such, too
                await connect(lambda: self, taken, ssl=self._context, ssl_handshake_timeout=self._timeout_s)
        finally:
            self._doorman.leave(self)
