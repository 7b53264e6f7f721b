"""What transports that move blocks in host memory have in common: xxh3-64 of each block, and a stream socket.

A lane of such a transport derives from these and replaces what it does otherwise.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from kvtransfer.base import BlockRef
from kvtransfer.connection import Connection
from kvtransfer.frame import Frame
from kvtransfer.handshake import Hello
from kvtransfer.pool import Pool
from kvtransfer.ring import Loan, Ring
from kvtransfer.transport import Fields, FrameSink, TransportStatus
from tandem.types import BlockId

XXH3 = "xxh3-64"
"""xxh3-64 with seed 0 over a row's bytes, computed on the host."""
_BACKLOG = 128
_Address: TypeAlias = tuple[Any, ...] | str


def host_status(name: str, device: torch.device, does: str) -> TransportStatus:
    """Status of a transport that works on this machine: whether blocks on `device` can pass through host memory."""
    if device.type == "cpu":
        return TransportStatus(name, True, does)
    if device.type == "cuda":
        return TransportStatus(name, True, f"{does}, through host memory")
    return TransportStatus(name, False, f"pools on {device.type} cannot be reached by this version")


def listening(sock: socket.socket, address: _Address) -> socket.socket:
    """`sock`, bound and listening, non-blocking. Raises OSError; the socket is then closed."""
    try:
        sock.bind(address)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


async def connected(sock: socket.socket, address: _Address) -> socket.socket:
    """`sock`, connected, non-blocking; the caller sets the deadline. Raises OSError; the socket is then closed."""
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


class HostLane:
    """Implements `transport.Lane`: plain, without details, holding nothing of the peer."""

    name: str
    verify: tuple[str, ...] = (XXH3,)
    details: Fields = MappingProxyType({})

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def secure(self, connection: Connection) -> None:
        """Nothing to do."""

    def attach(self, theirs: Hello, verify: str) -> None:
        """Nothing to do."""

    async def prepare(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing to release."""

    async def closed(self) -> None:
        """Nothing is left to a thread."""


class HostSendingLane(HostLane):
    """Implements `transport.SendingLane`, except that nothing moves."""

    def __init__(self, pool: Pool, ring: Ring | None = None) -> None:
        """`ring`: whose rows the blocks of a WRITE pass through; None = they need none."""
        super().__init__(pool)
        self._ring = ring or Ring()

    async def receive_hello(self, connection: Connection) -> Frame:
        """See `SendingLane`."""
        return await connection.receive()

    def make_ready(self, targets: Sequence[BlockRef]) -> None:
        """Nothing to do where this end writes nothing."""

    def reserve(self, num_blocks: int) -> asyncio.Future[Loan]:
        """See `SendingLane`."""
        return self._ring.take(num_blocks)

    async def place(self, sources: Sequence[BlockId], targets: Sequence[BlockRef], loan: Loan) -> tuple[int, ...]:
        """See `SendingLane`: brings the blocks into this side's rows."""
        rows = loan.rows_for(sources)
        await self._pool.stage(sources, rows)
        return await self._pool.checksums(rows)

    def announce(
        self, sink: FrameSink, write: Frame, sources: Sequence[BlockId], loan: Loan
    ) -> asyncio.Future[None] | None:
        """See `SendingLane`."""
        return sink.send(write)


class HostReceivingLane(HostLane):
    """Implements `transport.ReceivingLane` for a peer that itself writes into the pool; `peer_dead` is missing."""

    peer_writes = True

    def send_hello(self, connection: Connection, hello: Frame) -> None:
        """See `ReceivingLane`."""
        connection.send(hello)

    def expect(self, num_transfers: int) -> None:
        """Nothing to do for a peer that itself writes."""

    async def receive(
        self, connection: Connection, blocks: Sequence[BlockId], num_bytes: int, wanted: Callable[[], bool]
    ) -> None:
        """Takes nothing: the payload is in memory already."""

    async def checksums(self, blocks: Sequence[BlockId]) -> tuple[int, ...]:
        """See `ReceivingLane`."""
        return await self._pool.checksums(blocks)

    async def settle(self, blocks: Sequence[BlockId]) -> None:
        """Does nothing: the blocks were verified in the pool itself."""
