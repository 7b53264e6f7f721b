"""TCP: payload follows each WRITE frame and is received straight into its blocks."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Sequence

from kvtransfer.base import BlockRef
from kvtransfer.local_pool import LocalPool
from tandem.errors import ConfigError
from tandem.types import BlockId

NAME = "tcp"
_BACKLOG = 128
_JOIN_BELOW_BYTES = 64 * 1024
"""Blocks smaller than this are joined for sending: one copy is cheaper than many system calls."""


def listen(host: str, port: int = 0) -> socket.socket:
    """A listening socket; port 0 = any free one. Raises ConfigError."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise ConfigError("listen", f"cannot resolve {host!r}: {error}") from error
    try:
        # A fixed port is wanted again at once by the next life of this process, while old connections linger.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise ConfigError("listen", f"cannot listen on {host!r}, port {port}: {error}") from error
    return sock


async def dial(host: str, port: int) -> socket.socket:
    """A connected socket; the caller sets the deadline. Raises OSError."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(errno.EINVAL, "no host name") from error
    family, kind, proto, _, address = found[0]
    sock = socket.socket(family, kind, proto)
    sock.setblocking(False)
    try:
        await loop.sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


class TcpLane:
    """Sends from the local pool's rows; holds nothing of the peer."""

    name = NAME

    def __init__(self, pool: LocalPool) -> None:
        self._pool = pool

    def place(self, sources: Sequence[BlockId], targets: Sequence[BlockRef]) -> tuple[int, ...]:
        """Checksums only; the receiver does the writing."""
        del targets
        return self._pool.checksums(sources)

    def inline(self, sources: Sequence[BlockId]) -> Sequence[memoryview]:
        """The blocks' bytes in order."""
        spans = self._pool.spans(sources)
        if len(spans) > 1 and self._pool.block_bytes < _JOIN_BELOW_BYTES:
            return [memoryview(b"".join(spans))]
        return spans

    def close(self) -> None:
        """Nothing to let go of."""


class TcpLanding:
    """The receiver writes its blocks by itself: once it stops reading, nobody writes."""

    name = NAME
    inline = True
    shared_fd = None

    async def peer_dead(self) -> None:
        """At once: the peer never could write."""

    def close(self) -> None:
        """Nothing to let go of."""
