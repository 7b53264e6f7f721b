"""Shared memory: each part of the receiver's pool lies in a memfd, which the sender maps and writes into.

How they meet, and what proves that the sender has stopped: `same_host`. Row 0 of a part lies at byte 0 of its memfd.
Of a staged pool, each sender has a slice of the rows, named in the receiver's HELLO; it puts blocks into whichever of
them are free, and says after each WRITE which ones. They are free when the WRITE is answered.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from kvtransfer.connection import Connection
from kvtransfer.fields import required, required_int
from kvtransfer.frame import Frame
from kvtransfer.grain_rows import GrainRows
from kvtransfer.handshake import Hello
from kvtransfer.plan import places
from kvtransfer.pool import Pool
from kvtransfer.ring import Loan, Ring
from kvtransfer.rows import RowIds, Rows
from kvtransfer.transport import (
    Acceptor,
    Fields,
    ListenOptions,
    SendingLane,
    TransportFull,
    TransportStatus,
)
from kvtransfer.transports.host import host_status
from kvtransfer.transports.same_host import (
    SharingLane,
    acceptor,
    cannot_watch,
    dial,
    elsewhere,
    receive_with_descriptors,
)
from tandem.errors import ConfigError, FrameError, PeerLost, TransferError
from tandem.security.tls import ClientTls
from tandem.types import BlockId

NAME = "shm"
_ROWS = "rows"
"""Detail of a receiver's HELLO: first row and number of rows of the slice."""
_ROW = np.dtype("<u4")
_MAX_ROWS = 2**31


class ShmTransport:
    """Implements `transport.Transport`. Plain: the kernel names the peer's user, and nothing leaves the machine."""

    name = NAME
    splits = True
    gpu_each = False
    dial_s: float | None = None

    def probe(self, device: torch.device) -> TransportStatus:
        """See `Transport`."""
        if (reason := cannot_watch()) is not None:
            return TransportStatus(NAME, False, reason)
        try:
            os.close(os.memfd_create("tandem-probe"))
        except OSError as error:
            return TransportStatus(NAME, False, f"needs memfd: {error.strerror}")
        return host_status(NAME, device, "sender writes into the receiver's memory on the same machine")

    def listen(self, pool: Pool, options: ListenOptions) -> Acceptor:
        """See `Transport`."""
        if len(pool.shared_fds) < len(pool.parts):
            raise ConfigError("transport", "shm needs a pool in shared memory")
        return acceptor(partial(_ReceivingLane, pool, pool.shared_fds), {})

    def unreachable(self, pool: Pool, fields: Fields) -> str | None:
        """See `Transport`."""
        return elsewhere(fields)

    async def dial(self, pool: Pool, fields: Fields, tls: ClientTls | None) -> tuple[socket.socket, SendingLane]:
        """See `Transport`."""
        return await dial(required(fields, "unix_name")), _SendingLane(pool)


class _SendingLane(SendingLane):
    """Copies blocks into the peer's rows, mapped by the descriptors that came with its HELLO.

    Blocks of a staged pool are copied there at once, not into rows of this side.
    """

    name = NAME
    splits = True

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self._descriptors: list[int] = []
        self._mappings: list[mmap.mmap] = []
        self._parts: list[Rows] = []
        """The peer's, by rank."""
        self._peer: GrainRows | None = None
        self._names_rows = False
        """Whether each WRITE says into which rows of this connection's slice its blocks were put."""

    async def receive_hello(self, connection: Connection) -> Frame:
        frame, self._descriptors = await receive_with_descriptors(connection)
        return frame

    def attach(self, theirs: Hello, verify: str) -> None:
        super().attach(theirs, verify)
        if len(self._descriptors) != theirs.num_ranks:
            raise TransferError("the peer did not share its memory")
        if self._pool.is_staged and theirs.num_ranks > 1:
            raise TransferError("shm copies blocks of a device whole, and ranks divide the peer's pool; use tcp")
        rows = _slice_of(theirs)
        num_rows = theirs.num_blocks if rows is None else rows.stop
        part_bytes = self._pool.fingerprints.layout.part(theirs.num_ranks).block_bytes
        for descriptor in self._descriptors:
            self._parts.append(self._map(descriptor, num_rows, part_bytes))
        self._peer = GrainRows(self._parts, self._plan.target)
        if rows is not None:
            self._ring, self._names_rows = Ring(rows), True
        self._close_descriptors()

    def close(self) -> None:
        super().close()
        self._close_descriptors()
        if self._peer is not None:
            self._peer.close()
            self._peer = None
        for part in self._parts:
            part.close()
        for mapping in self._mappings:
            mapping.close()

    def make_ready(self, targets: RowIds) -> None:
        if not self._names_rows:
            self._pool.populate(self._parts, targets)

    async def place(self, sources: Sequence[BlockId], targets: Sequence[BlockId], loan: Loan) -> tuple[int, ...]:
        peer, rows = self._peer, loan.rows_for(targets)
        if peer is None:
            raise PeerLost("the mapping of the peer's pool is closed")
        loan.num_spans = len(sources) * len(places(self._plan.target))
        if self._pool.is_staged:
            return await self._pool.copy_out(peer, sources, rows)
        copy = partial(self._rows.copy_to, peer, self._plan, sources, rows)
        return await self._pool.start(copy, len(sources) * self._pool.block_bytes)

    def announce(
        self, connection: Connection, write: Frame, sources: Sequence[BlockId], loan: Loan
    ) -> asyncio.Future[None] | None:
        if not self._names_rows:
            return connection.send(write)
        connection.send(write, [memoryview(np.array(loan.rows, _ROW).tobytes())])  # nothing waits for it to leave
        return None

    def _map(self, descriptor: int, num_rows: int, row_bytes: int) -> Rows:
        try:
            if os.fstat(descriptor).st_size < num_rows * row_bytes:
                raise TransferError("the peer's shared memory is smaller than what it offers")
            self._mappings.append(mmap.mmap(descriptor, num_rows * row_bytes))
        except (OSError, ValueError) as error:
            raise TransferError(f"cannot map the peer's pool: {error}") from error
        # A child forked by this process must not be able to write there after we are gone.
        self._mappings[-1].madvise(mmap.MADV_DONTFORK)
        return Rows(np.frombuffer(self._mappings[-1], np.uint8).reshape(num_rows, row_bytes))

    def _close_descriptors(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


class _ReceivingLane(SharingLane):
    """Shares the pool's rows, or of a staged pool a slice of them, with one peer process."""

    name = NAME
    splits = True

    def __init__(self, pool: Pool, shared_fds: Sequence[int], sock: socket.socket) -> None:
        super().__init__(pool, shared_fds, sock)
        self._slice: range | None = None
        self._filled: Sequence[int] | None = None
        """Where the blocks of the WRITE at hand lie; None = not in rows of this connection."""
        if pool.is_staged:
            self._slice = pool.lend_slice()
            if self._slice is None:
                self.close()
                raise TransportFull("all slices of the host ring are lent to other senders")
            self.details = {_ROWS: f"{self._slice.start}:{len(self._slice)}"}

    async def receive(
        self, connection: Connection, blocks: Sequence[BlockId], num_bytes: int, wanted: Callable[[], bool]
    ) -> None:
        if self._slice is None:
            self._filled = blocks
            return
        named, filled = bytearray(num_bytes // self._pool.block_bytes * _ROW.itemsize), 0
        while filled < len(named):
            filled += await connection.receive_some(memoryview(named)[filled:])
        rows = tuple(np.frombuffer(named, _ROW).tolist())
        is_ours = len(rows) == len(blocks) == len(set(rows)) and all(row in self._slice for row in rows)
        self._filled = rows if is_ours else None

    async def checksums(self, blocks: Sequence[BlockId]) -> tuple[int, ...]:
        if self._filled is None:
            raise FrameError("a WRITE names rows that are not its sender's")
        return await self._pool.checksums(self._rows, self._filled)

    async def settle(self, blocks: Sequence[BlockId]) -> None:
        if self._filled is not None:
            await self._pool.settle(self._filled, blocks)

    def close(self) -> None:
        """The peer is proven unable to write, or never could: the slice may be another's."""
        if self._slice is not None:
            self._pool.return_slice(self._slice)
            self._slice = None
        super().close()


def _slice_of(receiver: Hello) -> range | None:
    """The rows that it lends to this connection; None = it shares the pool itself. Raises FrameError."""
    if _ROWS not in receiver.details:
        return None
    first, _, count = receiver.details[_ROWS].partition(":")
    fields = {"first": first, "count": count}
    start = required_int(fields, "first", _MAX_ROWS)
    return range(start, start + max(1, required_int(fields, "count", _MAX_ROWS)))
