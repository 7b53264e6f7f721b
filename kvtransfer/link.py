"""The sender's side of one connection: its lane, the hand-offs on it, and its orderly end.

    connected → (peer lost | closed here) → hand-offs ended → copies finished → unmapped → BYE

BYE is said only after the peer's memory is unmapped, so that it proves what it says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvtransfer.connection import Connection
from kvtransfer.frame import Frame, FrameType
from kvtransfer.handoff import OutgoingHandoff
from kvtransfer.handshake import Hello
from kvtransfer.messages import decode_error
from kvtransfer.pool import Pool
from kvtransfer.ticket import Ticket
from kvtransfer.transport import SendingLane
from shell.clock import Clock
from tandem.errors import ChecksumMismatch, FrameError, PeerLost, TicketRefused, TransferError

CORRUPT_IN_A_ROW = 2
"""Hand-offs with blocks that differ from what was announced: after so many without a good one between, the way itself
corrupts, as copies between GPUs do on some machines with an IOMMU."""


class Link:
    """Owns the connection and the lane. `close` must be called once."""

    def __init__(
        self,
        connection: Connection,
        lane: SendingLane,
        peer: Hello,
        pool: Pool,
        clock: Clock,
        on_corrupt: Callable[[ChecksumMismatch], object],
    ) -> None:
        """`on_corrupt` gets the last error once CORRUPT_IN_A_ROW hand-offs failed by checksum; the link then ends."""
        self._connection = connection
        self._lane = lane
        self._peer = peer
        self._pool = pool
        self._clock = clock
        self._on_corrupt = on_corrupt
        self._num_corrupt = 0
        """Hand-offs that failed by checksum since the last commit."""
        self._handoffs: dict[int, OutgoingHandoff] = {}
        self._ended: TransferError | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._reading = asyncio.get_running_loop().create_task(self._read(), name="kv-link-read")

    @property
    def is_open(self) -> bool:
        """Whether hand-offs can be opened on this link."""
        return self._ended is None

    @property
    def is_idle(self) -> bool:
        """Whether the link carries no hand-off."""
        return not self._handoffs

    def is_idle_over(self, transport: str) -> bool:
        """Whether the link is open over that transport and carries no hand-off."""
        return self.is_open and self.is_idle and self._lane.name == transport

    async def open(self, ticket: Ticket) -> OutgoingHandoff:
        """Shows the ticket. Raises TransferError; then, or when cancelled, nothing stays open."""
        self._check(ticket)
        if self._ended is not None:
            raise self._ended
        if ticket.number in self._handoffs:
            raise TicketRefused(f"transfer {ticket.transfer_id} is open already")
        handoff = OutgoingHandoff(ticket, self._connection, self._lane, self._pool, self._clock, self._forget)
        self._handoffs[ticket.number] = handoff
        try:
            await handoff.show()
        except BaseException:
            await handoff.abort()
            self._forget(ticket.number)
            raise
        self._lane.make_ready(ticket.blocks.block_ids)
        return handoff

    async def close(self) -> None:
        """Ends every hand-off and the connection, in order. Idempotent."""
        await asyncio.wait({self._end(PeerLost("the sender closed the connection"))})

    def _forget(self, number: int) -> None:
        self._handoffs.pop(number, None)

    def _check(self, ticket: Ticket) -> None:
        if ticket.incarnation != self._peer.incarnation:
            raise TicketRefused(f"transfer {ticket.transfer_id} was offered by another incarnation")
        if ticket.layout_fingerprint != self._pool.fingerprints.layout.fingerprint():
            raise TicketRefused(f"transfer {ticket.transfer_id} has another layout")
        if any(ticket.blocks.block_ids >= self._peer.num_blocks):
            raise TicketRefused(f"transfer {ticket.transfer_id} leaves the peer's {self._peer.num_blocks} blocks")

    async def _read(self) -> None:
        try:
            while True:
                self._dispatch(await self._connection.receive())
        except TransferError as error:
            self._end(error)

    def _dispatch(self, frame: Frame) -> None:
        if frame.type is FrameType.HEARTBEAT:
            return
        if frame.transfer == 0:
            raise FrameError(f"{frame.type.name} names no transfer")
        handoff = self._handoffs.get(frame.transfer)
        if handoff is None:  # late: the hand-off has ended here
            return
        handoff.handle(frame)
        if frame.type in {FrameType.COMMITTED, FrameType.REFUSED, FrameType.DRAINED}:
            self._forget(frame.transfer)
        self._judge(frame)

    def _judge(self, frame: Frame) -> None:
        """Counts what the receiver says of a hand-off's bytes."""
        if frame.type is FrameType.COMMITTED:
            self._num_corrupt = 0
        if frame.type not in {FrameType.FAILED, FrameType.WITHDRAWN}:
            return
        error = decode_error(frame.payload)
        if isinstance(error, ChecksumMismatch):
            self._num_corrupt += 1
            if self._num_corrupt == CORRUPT_IN_A_ROW:
                self._on_corrupt(error)
                self._end(error)

    def _end(self, error: TransferError) -> asyncio.Task[None]:
        """Ends every hand-off now; the task returned releases what is the peer's, and is never cancelled."""
        if self._leaving is None:
            self._ended = error
            for handoff in self._handoffs.values():
                handoff.end(error)
            self._leaving = asyncio.get_running_loop().create_task(self._leave(), name="kv-link-leave")
        return self._leaving

    async def _leave(self) -> None:
        self._reading.cancel()
        await asyncio.wait({self._reading})
        for handoff in tuple(self._handoffs.values()):  # one that says DRAINED meanwhile is forgotten
            await handoff.quiet()
        self._handoffs.clear()
        self._lane.close()
        await self._lane.closed()
        self._connection.send(Frame(FrameType.BYE))
        await self._connection.finish()
        await self._connection.close()
