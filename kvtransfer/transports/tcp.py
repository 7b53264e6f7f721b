"""TCP: payload follows each WRITE frame and is received straight into its blocks, or into rows of the ring first."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Sequence

import torch

from kvtransfer.base import BlockRef
from kvtransfer.connection import Connection
from kvtransfer.fields import required, required_int
from kvtransfer.frame import Frame
from kvtransfer.host_ring import HostRing
from kvtransfer.local_pool import LocalPool
from kvtransfer.room import Room
from kvtransfer.transport import Acceptor, Fields, FrameSink, ListenOptions, SendingLane, TransportStatus
from kvtransfer.transports.host import HostReceivingLane, HostSendingLane, connected, host_status, listening
from tandem.errors import ConfigError, HandshakeMismatch, TransferError
from tandem.security.tls import ClientTls, ServerTls
from tandem.types import BlockId

NAME = "tcp"
_DISCARD_BYTES = 64 * 1024
_HOT_BYTES = 512 * 1024
"""Received at a time, so that it is still in the cache of one core when it is hashed."""
_JOIN_BELOW_BYTES = 64 * 1024
"""Blocks smaller than this are joined for sending: one copy is cheaper than many system calls."""


def listen(host: str, port: int = 0) -> socket.socket:
    """A listening socket; port 0 = any free one. Raises ConfigError."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise ConfigError("--listen", f"cannot resolve {host!r}: {error}") from error
    # A fixed port is wanted again at once by the next life of this process, while old connections linger.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        return listening(sock, address)
    except OSError as error:
        option = "--kv-port" if port and error.errno != errno.EADDRNOTAVAIL else "--listen"
        raise ConfigError(option, f"cannot listen on {host!r}, port {port}: {error}") from error


async def dial(host: str, port: int) -> socket.socket:
    """A connected socket; the caller sets the deadline. Raises OSError."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(errno.EINVAL, "no host name") from error
    family, kind, proto, _, address = found[0]
    return await connected(socket.socket(family, kind, proto), address)


class TcpTransport:
    """Implements `transport.Transport`."""

    name = NAME
    gpu_each = False

    def probe(self, device: torch.device) -> TransportStatus:
        """See `Transport`."""
        return host_status(NAME, device, "payload over the network, received into the blocks")

    def listen(self, pool: LocalPool, options: ListenOptions) -> Acceptor:
        """See `Transport`."""
        sock = listen(options.host, options.port)
        fields = {
            "host": options.advertise_host,
            "port": str(sock.getsockname()[1]),
            "tls": on_off(options.tls is not None),
        }
        return Acceptor(sock, fields, lambda _: _ReceivingLane(pool, options.tls))

    def unreachable(self, pool: LocalPool, fields: Fields) -> str | None:
        """See `Transport`."""
        return None

    async def dial(self, pool: LocalPool, fields: Fields, tls: ClientTls | None) -> tuple[socket.socket, SendingLane]:
        """See `Transport`. One side that was told to use TLS never speaks in clear: HandshakeMismatch."""
        host, port = required(fields, "host"), required_int(fields, "port", 2**16 - 1)
        ours, theirs = on_off(tls is not None), required(fields, "tls")
        if ours != theirs:
            raise HandshakeMismatch("tls", ours, theirs)
        return await dial(host, port), _SendingLane(pool, host, tls)


class _SendingLane(HostSendingLane):
    """Sends from the local rows, in order, after the WRITE; holds nothing of the peer."""

    name = NAME

    def __init__(self, pool: LocalPool, host: str, tls: ClientTls | None) -> None:
        super().__init__(pool)
        self._host = host
        self._tls = tls

    async def secure(self, connection: Connection) -> None:
        if self._tls is not None:
            await connection.begin_tls(self._tls.context(), self._tls.server_name or self._host)

    def reserve(self, num_blocks: int) -> asyncio.Future[Room]:
        ring = self._pool.ring
        return super().reserve(num_blocks) if ring is None else ring.leaving.take(num_blocks)

    async def place(self, sources: Sequence[BlockId], targets: Sequence[BlockRef], room: Room) -> tuple[int, ...]:
        ring = self._pool.ring
        if ring is None:
            return await super().place(sources, targets, room)
        await self._pool.copy_out(sources, ring, room.rows)
        return await self._pool.start(lambda: ring.checksums(room.rows), len(sources) * self._pool.block_bytes)

    def announce(
        self, sink: FrameSink, write: Frame, sources: Sequence[BlockId], room: Room
    ) -> asyncio.Future[None] | None:
        ring = self._pool.ring
        spans = self._pool.spans(sources) if ring is None else ring.spans(room.rows)
        if len(spans) > 1 and self._pool.block_bytes < _JOIN_BELOW_BYTES:
            spans = [memoryview(b"".join(spans))]
        sent = sink.send(write, spans)
        if sent is None:
            room.release()
        else:
            sent.add_done_callback(lambda _: room.release())
        return sent


class _ReceivingLane(HostReceivingLane):
    """Receives into the pool, or into the ring and at once on into the pool: once this side stops, nobody writes.

    What passes through the ring is in the pool before it is compared with what was announced: nobody uses it before.
    """

    name = NAME
    peer_writes = False

    def __init__(self, pool: LocalPool, tls: ServerTls | None) -> None:
        super().__init__(pool)
        self._tls = tls
        self._found: list[int] = []
        self._failure: TransferError | None = None

    async def secure(self, connection: Connection) -> None:
        if self._tls is not None:
            await connection.begin_tls(self._tls.context())

    async def receive(
        self, connection: Connection, blocks: Sequence[BlockId], num_bytes: int, wanted: Callable[[], bool]
    ) -> None:
        ring = self._pool.ring
        if ring is None:
            num_bytes -= await self._receive_hashed(connection, blocks, wanted)
        else:
            num_bytes -= await self._receive_through(ring, connection, blocks, wanted)
        scrap = memoryview(bytearray(min(num_bytes, _DISCARD_BYTES)))
        while num_bytes:
            num_bytes -= await connection.receive_some(scrap[:num_bytes])

    async def checksums(self, blocks: Sequence[BlockId]) -> tuple[int, ...]:
        if self._failure is not None:
            raise self._failure
        return tuple(self._found)

    async def peer_dead(self) -> None:
        """At once: the peer never could write."""

    async def _receive_hashed(
        self, connection: Connection, blocks: Sequence[BlockId], wanted: Callable[[], bool]
    ) -> int:
        """Receives into the pool; returns how many bytes.

        Each block is hashed as soon as it is whole: while it is in the core's cache, that is a small part of what
        receiving it took, and less than the trip to a thread.
        """
        self._found, size = [], self._pool.block_bytes
        num_bytes = 0
        for span in self._pool.spans(blocks):
            filled = 0
            while filled < len(span) and wanted():
                count = await connection.receive_some(span[filled : filled + _HOT_BYTES])
                filled, num_bytes = filled + count, num_bytes + count
                if whole := blocks[len(self._found) : num_bytes // size]:
                    self._found.extend(self._pool.checksums(whole))
        return num_bytes

    async def _receive_through(
        self, ring: HostRing, connection: Connection, blocks: Sequence[BlockId], wanted: Callable[[], bool]
    ) -> int:
        """Takes as many blocks at a time as there are rows for; returns how many bytes it took.

        The first copy that fails is the last: `checksums` raises it, as the payload has to leave the connection first.
        """
        self._found, self._failure = [], None
        num_bytes = 0
        while len(self._found) < len(blocks) and wanted() and self._failure is None:
            room = await ring.arriving.taken(len(blocks) - len(self._found))
            try:
                filled = await _fill(connection, ring.spans(room.rows), wanted)
                num_bytes += filled
                if filled == room.num_blocks * self._pool.block_bytes:
                    await self._settle(ring, room, blocks[len(self._found) :][: room.num_blocks])
            finally:
                room.release()
        return num_bytes

    async def _settle(self, ring: HostRing, room: Room, blocks: Sequence[BlockId]) -> None:
        found = await self._pool.start(lambda: ring.checksums(room.rows), room.num_blocks * self._pool.block_bytes)
        try:
            await self._pool.copy_in(ring, room.rows, blocks)
        except TransferError as error:
            self._failure = error
        self._found.extend(found)


async def _fill(connection: Connection, spans: Sequence[memoryview], wanted: Callable[[], bool]) -> int:
    """Receives into the spans, in order, while `wanted()`; returns how many bytes."""
    num_bytes = 0
    for span in spans:
        filled = 0
        while filled < len(span) and wanted():
            filled += await connection.receive_some(span[filled:])
        num_bytes += filled
    return num_bytes


def on_off(is_on: bool) -> str:
    """As endpoints say it."""
    return "on" if is_on else "off"
