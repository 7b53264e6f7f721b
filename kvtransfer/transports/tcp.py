"""TCP: payload follows each WRITE frame and is received straight into its blocks, or into rows of the ring first."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvtransfer.connection import Connection
from kvtransfer.device_work import DeviceWork
from kvtransfer.fields import required, required_int
from kvtransfer.frame import Frame
from kvtransfer.grain_rows import Piece
from kvtransfer.pool import Pool
from kvtransfer.ring import Loan, Ring
from kvtransfer.rows import Rows
from kvtransfer.transport import Acceptor, Fields, ListenOptions, ReceivingLane, SendingLane, TransportStatus
from kvtransfer.transports.host import connected, host_status, listening
from shell.thread_work import to_the_end
from tandem.errors import ConfigError, HandshakeMismatch, TransferError
from tandem.security.tls import ClientTls, ServerTls
from tandem.types import BlockId

NAME = "tcp"
_DISCARD_BYTES = 64 * 1024
_HOT_BYTES = 512 * 1024
"""Received at a time, so that it is still in the cache of one core when it is hashed."""
_JOIN_BELOW_BYTES = 64 * 1024
"""Spans smaller than this are joined for sending and receiving: one copy is cheaper than many system calls."""


def listen(host: str, port: int = 0) -> socket.socket:
    """Returns a listening socket; port 0 = any free port. Raises ConfigError."""
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
    splits = True
    gpu_each = False
    dial_s: float | None = None

    def probe(self, device: torch.device) -> TransportStatus:
        """See `Transport`."""
        return host_status(NAME, device, "payload over the network, received into the blocks")

    def listen(self, pool: Pool, options: ListenOptions) -> Acceptor:
        """See `Transport`."""
        sock = listen(options.host, options.port)
        return Acceptor(sock, address_fields(sock, options), lambda _: _ReceivingLane(pool, options.tls))

    def unreachable(self, pool: Pool, fields: Fields) -> str | None:
        """See `Transport`."""
        return None

    async def dial(self, pool: Pool, fields: Fields, tls: ClientTls | None) -> tuple[socket.socket, SendingLane]:
        """See `Transport`."""
        host, port = address_of(fields, tls)
        return await dial(host, port), _SendingLane(pool, host, tls, pool.leaving)


class NetworkSendingLane(SendingLane):
    """A lane whose control protocol runs over TCP, inside TLS if there is any."""

    def __init__(
        self,
        pool: Pool,
        host: str,
        tls: ClientTls | None,
        ring: Ring | None = None,
        work: DeviceWork | None = None,
    ) -> None:
        """`host`: whom the peer's certificate names, unless `tls` says another."""
        super().__init__(pool, ring, work)
        self._host = host
        self._tls = tls

    async def secure(self, connection: Connection) -> None:
        """See `Lane`."""
        if self._tls is not None:
            await connection.begin_tls(self._tls.context(), self._tls.server_name or self._host)


class NetworkReceivingLane(ReceivingLane):
    """The other end of a `NetworkSendingLane`."""

    def __init__(self, pool: Pool, tls: ServerTls | None, work: DeviceWork | None = None) -> None:
        super().__init__(pool, work)
        self._tls = tls

    async def secure(self, connection: Connection) -> None:
        """See `Lane`."""
        if self._tls is not None:
            await connection.begin_tls(self._tls.context())


class _SendingLane(NetworkSendingLane):
    """Sends from this side's rows, in order, after the WRITE; holds nothing of the peer."""

    name = NAME
    splits = True

    def announce(
        self, connection: Connection, write: Frame, sources: Sequence[BlockId], loan: Loan
    ) -> asyncio.Future[None] | None:
        spans = [piece.memory for piece in self._rows.pieces(loan.rows_for(sources))]
        if len(spans) > 1 and len(sources) * self._pool.block_bytes < len(spans) * _JOIN_BELOW_BYTES:
            spans = [memoryview(b"".join(spans))]
        loan.num_spans = len(spans)
        sent = connection.send(write, spans)
        if sent is None:
            loan.release()
        else:
            sent.add_done_callback(lambda _: loan.release())
        return sent


class _ReceivingLane(NetworkReceivingLane):
    """Receives into this side's rows, and at once on into the pool: once this side stops, nobody writes.

    Blocks of a staged pool are there before they are compared with what was announced: nobody uses them before.
    """

    name = NAME
    splits = True

    def __init__(self, pool: Pool, tls: ServerTls | None) -> None:
        super().__init__(pool, tls)
        self._found: list[int] = []
        self._failure: TransferError | None = None

    async def receive(
        self, connection: Connection, blocks: Sequence[BlockId], num_bytes: int, wanted: Callable[[], bool]
    ) -> None:
        """Takes as many blocks at a time as there are rows for.

        The first copy that fails is the last: `checksums` raises it, as the payload has to leave the connection first.
        """
        self._found, self._failure = [], None
        while (start := len(self._found) // len(self.places)) < len(blocks) and wanted() and self._failure is None:
            loan = await self._pool.arriving.taken(len(blocks) - start)
            try:
                due = blocks[start:][: loan.num_blocks]
                num_bytes -= await self._receive_rows(connection, loan.rows_for(due), due, wanted)
            finally:
                loan.release()
        scrap = memoryview(bytearray(min(num_bytes, _DISCARD_BYTES)))
        while num_bytes:
            num_bytes -= await connection.receive_some(scrap[:num_bytes])

    async def checksums(self, blocks: Sequence[BlockId]) -> tuple[int, ...]:
        if self._failure is not None:
            raise self._failure
        return tuple(self._found)

    async def settle(self, blocks: Sequence[BlockId]) -> None:
        """Copies to ranks that share heads what came once."""
        parts, pairs = self._pool.parts, self._plan.copies
        if pairs:
            num_bytes = len(pairs) * len(blocks) * self._pool.block_bytes
            copies = self._pool.start(
                lambda: [parts[source].copy_to(parts[to], blocks, blocks) for source, to in pairs], num_bytes
            )
            await to_the_end(copies)

    async def _receive_rows(
        self, connection: Connection, rows: Sequence[int], blocks: Sequence[BlockId], wanted: Callable[[], bool]
    ) -> int:
        """Receives these blocks into `rows`, and on into the pool; returns how many bytes."""
        pieces = list(self._rows.pieces(rows))
        are_small = len(blocks) * self._pool.block_bytes < len(pieces) * _JOIN_BELOW_BYTES
        receive = self._receive_joined if are_small and len(pieces) > 1 else self._receive_pieces
        found, num_bytes = await receive(connection, pieces, wanted)
        if len(found) == len(blocks) * len(self.places):
            try:
                await self._pool.settle(rows, blocks)
            except TransferError as error:
                self._failure = error
        self._found.extend(found)
        return num_bytes

    async def _receive_pieces(
        self, connection: Connection, pieces: Sequence[Piece], wanted: Callable[[], bool]
    ) -> tuple[list[int], int]:
        """Returns the checksums of whole grains, and how many bytes came.

        Each grain is hashed as soon as it is whole: while it is in the core's cache, that is a small part of what
        receiving it took, and less than the trip to a thread.
        """
        found: list[int] = []
        num_bytes = 0
        for span, part, grains in pieces:
            filled, num_whole = 0, 0
            while filled < len(span) and wanted():
                filled += await connection.receive_some(span[filled : filled + _HOT_BYTES])
                if whole := grains[num_whole : filled // part.row_bytes]:
                    found.extend(part.checksums(whole))
                    num_whole += len(whole)
            num_bytes += filled
        return found, num_bytes

    async def _receive_joined(
        self, connection: Connection, pieces: Sequence[Piece], wanted: Callable[[], bool]
    ) -> tuple[list[int], int]:
        """Receives through a buffer, from which grains are copied, and hashed, part by part."""
        grains = [(piece.rows, grain) for piece in pieces for grain in piece.ids]
        size = grains[0][0].row_bytes
        buffer = Rows(np.empty((max(1, _HOT_BYTES // size), size), np.uint8))
        found: list[int] = []
        num_bytes = 0
        while len(found) < len(grains) and wanted():
            due = grains[len(found) : len(found) + len(buffer.array)]
            (span,) = buffer.spans(range(len(due)))
            filled = 0
            while filled < len(span) and wanted():
                filled += await connection.receive_some(span[filled:])
            num_bytes += filled
            if filled == len(span):
                found.extend(_scattered(buffer, due))
        return found, num_bytes


def _scattered(buffer: Rows, grains: Sequence[tuple[Rows, int]]) -> list[int]:
    """Copies row `i` of the buffer to grain `i`. Returns the checksums."""
    checksums = [0] * len(grains)
    by_part: dict[Rows, list[int]] = {}
    for i, (part, _) in enumerate(grains):
        by_part.setdefault(part, []).append(i)
    for part, rows in by_part.items():
        copied = buffer.copy_to(part, rows, [grains[i][1] for i in rows])
        for i, checksum in zip(rows, copied, strict=True):
            checksums[i] = checksum
    return checksums


def address_fields(sock: socket.socket, options: ListenOptions) -> dict[str, str]:
    """Returns an endpoint's fields of a listening socket; `address_of` reads these fields."""
    port = sock.getsockname()[1]
    return {"host": options.advertise_host, "port": str(port), "tls": on_off(options.tls is not None)}


def address_of(fields: Fields, tls: ClientTls | None) -> tuple[str, int]:
    """Returns host and port to dial. A side that is to use TLS never speaks in clear: raises HandshakeMismatch."""
    host, port = required(fields, "host"), required_int(fields, "port", 2**16 - 1)
    ours, theirs = on_off(tls is not None), required(fields, "tls")
    if ours != theirs:
        raise HandshakeMismatch("tls", ours, theirs)
    return host, port


def on_off(is_on: bool) -> str:
    """Returns the text for `is_on` in endpoints."""
    return "on" if is_on else "off"
