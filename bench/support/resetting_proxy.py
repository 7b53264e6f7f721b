"""A TCP proxy on loopback whose connections can be reset, as broken networks and firewalls do it. Knows no protocol."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator

_CHUNK_BYTES = 64 * 1024
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER on, 0 s: closing sends RST, and what was not sent yet is dropped."""


class ResettingProxy:
    """Passes bytes on to one address, until `reset`."""

    def __init__(self, target: str) -> None:
        """`target` is HOST:PORT; it need not be there yet."""
        host, _, port = target.rpartition(":")
        self._host = host
        self._port = int(port)
        self._writers: set[asyncio.StreamWriter] = set()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """The HOST:PORT that it listens on until the block ends, which resets what is open."""
        server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        try:
            host, port = server.sockets[0].getsockname()
            yield f"{host}:{port}"
        finally:
            server.close()
            self.reset()

    def reset(self) -> int:
        """Resets every connection on both sides; returns how many sides there were."""
        writers = list(self._writers)
        for writer in writers:
            _reset(writer)
        return len(writers)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            _reset(writer)
            return
        both = {writer, far_writer}
        self._writers |= both
        directions = [asyncio.create_task(_copy(reader, far_writer)), asyncio.create_task(_copy(far_reader, writer))]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._writers -= both
            for direction in directions:
                direction.cancel()
            for each in both:
                each.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):  # one side has gone
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):  # closed meanwhile
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
