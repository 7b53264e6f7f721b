"""The contract of a transport: one object that knows everything about one way to move payload.

The control protocol (tickets, frames, credit, ends) is the same for all transports and names none of them.

    receiver   `listen` once per pool, then `Acceptor.accept` once per connection → `ReceivingLane`
    sender     `unreachable` and `dial` once per receiving pool                   → `SendingLane`

Both lanes then live through one connection, in this order:

    secure → HELLO both ways → attach → prepare
           → per WRITE: reserve, place and announce | receive, checksums and settle → close → closed

A lane decides where blocks are read and written: where it does not reach a pool, the lane itself lets blocks pass
through rows of host memory (`Pool.stage`, `settle`), and no one else does. Those rows are few, so each WRITE begins
with `reserve`. COMMITTED and `TransferReport` mean "in the pool", copies out of such rows included.

How blocks are verified is agreed in HELLO. A writer is proven stopped by DRAINED, ABORT, BYE (sent after unmapping)
or the lane's `peer_dead`. Idempotent: `withdraw`, `reap`, `abort`, a repeated `commit`, `stop`, and every message
about a transfer that has ended.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch

from kernels.digest import MIX64
from kvtransfer.connection import Connection
from kvtransfer.device_work import DeviceWork
from kvtransfer.frame import Frame
from kvtransfer.grain_rows import GrainRows
from kvtransfer.handshake import Hello, fingerprint_fields
from kvtransfer.lane_thread import LaneThread
from kvtransfer.plan import WHOLE, Place, Plan, distinct, places
from kvtransfer.pool import Pool
from kvtransfer.ring import Loan, Ring
from kvtransfer.rows import XXH3, RowIds
from shell.thread_work import to_the_end
from tandem.errors import ConfigError, TransferError
from tandem.security.tls import ClientTls, ServerTls
from tandem.types import BlockId

PIECE_BYTES, DEVICE_PIECE_BYTES = 16 * 1024 * 1024, 128 * 1024 * 1024
"""Most payload of one WRITE, between pools in host memory and from a GPU. Few enough that several hand-offs share a
connection fairly. On a GPU more, since each WRITE costs both sides calls of the driver and waits for it: on an H100,
pieces of 16 MiB moved 8.5 of 279 GB/s."""
Fields = Mapping[str, str]
"""Named text values, each without a line break; names without `=`."""


class TransportFull(TransferError):
    """No connection more fits. One that is idle may be closed for it."""


class TransportStatus(NamedTuple):
    """Whether pools on one device can use a transport; `reason` says why not, else what it does."""

    name: str
    usable: bool
    reason: str


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """Where a receiver is to be reached; a transport takes what concerns it."""

    host: str
    port: int
    """0 = any free port."""
    advertise_host: str
    """What senders connect to."""
    tls: ServerTls | None
    """For connections that leave the machine; None = plain."""


class Lane:
    """One end of a connection. A transport's lane derives from `SendingLane` or `ReceivingLane` and replaces what it
    does otherwise: as they stand, connections are plain, and blocks lie in this side's rows or on its GPU.
    """

    name: str
    """The transport's."""
    verify: tuple[str, ...]
    """Ways to verify a block that this end can do, best first. Each is 8 bytes per block."""
    splits = False
    """Whether blocks can travel between pools that ranks divide."""
    details: Fields = MappingProxyType({})
    """What the transport's other end has to know: part of HELLO."""

    def __init__(self, pool: Pool, work: DeviceWork | None = None) -> None:
        """`work` computes the digests of a pool on a GPU; None = the blocks lie in host memory."""
        self._pool = pool
        self._plan = Plan.between(pool.fingerprints.layout, len(pool.parts), len(pool.parts))
        """Between this pool and the peer's, once hands were shaken; before, between this pool and one alike."""
        self._rows = GrainRows(pool.parts, self._plan.source)
        """Grains of this side's rows that the lane reads or writes."""
        self._work = work
        self._threads: list[LaneThread] = [] if work is None else [work]
        """Ended with the lane."""
        self.verify = (XXH3,) if work is None else (MIX64,)

    def hello(self) -> Hello:
        """What this end says of itself."""
        prints = fingerprint_fields(self._pool.fingerprints)
        pool = self._pool
        return Hello(pool.incarnation, self.name, pool.num_blocks, self.verify, prints, self.details, len(pool.parts))

    async def secure(self, connection: Connection) -> None:
        """Before the first frame: encryption, if any. The caller sets the deadline. Raises TransferError."""

    def _follow(self, num_sources: int, num_targets: int) -> Plan:
        """Returns the plan between pools of these sizes. Raises TransferError."""
        try:
            plan = Plan.between(self._pool.fingerprints.layout, num_sources, num_targets)
        except ConfigError as error:
            raise TransferError(f"no way from {num_sources} ranks to {num_targets}: {error}") from error
        if not (plan.is_whole or self.splits):
            raise TransferError(f"{self.name} does not reach pools that ranks divide; shm and tcp do")
        return plan

    async def prepare(self) -> None:
        """After `attach`, before anything else: what takes time. What a receiving lane adds to `details` here, the
        sender gets. The caller sets the deadline. Raises TransferError.
        """

    async def checksums(self, blocks: Sequence[BlockId]) -> tuple[int, ...]:
        """The 8 bytes that verify each of this side's blocks, of what lies there now. Raises TransferError."""
        if self._work is not None:
            return await self._work.checksums(blocks)
        return await self._pool.checksums(self._rows, blocks)

    def close(self) -> None:
        """Releases everything that is the peer's; nothing of this lane may be running. Idempotent, never waits."""
        self._rows.close()
        for thread in self._threads:
            thread.end()

    async def closed(self) -> bool:
        """After `close`: returns once what it left to threads has ended too, even if cancelled. Never raises else.

        A thread that hangs is left after `lane_thread.THREAD_ENDS_WITHIN_S`, so that no worker stands still with it:
        False.
        """
        ended: list[bool] = await to_the_end(asyncio.gather(*(thread.ended() for thread in self._threads)))
        return all(ended)


class SendingLane(Lane):
    """The sender's end."""

    passed_over = ""
    """Transports that come before this one, and why they were passed over, for people; set by who dialled."""

    @property
    def num_grains(self) -> int:
        """Grains of a block, each with a checksum of its own."""
        return self._plan.num_grains

    def __init__(self, pool: Pool, ring: Ring | None = None, work: DeviceWork | None = None) -> None:
        """`ring`: whose rows the blocks of a WRITE pass through; None = they need none."""
        super().__init__(pool, work)
        self._ring = ring or Ring()
        self.piece_bytes = PIECE_BYTES if work is None else DEVICE_PIECE_BYTES
        """Most payload of one WRITE, which holds at least one block."""

    def attach(self, theirs: Hello, verify: str) -> None:
        """Hands were shaken: blocks are verified by `verify`. Raises TransferError."""
        self._plan = self._follow(len(self._pool.parts), theirs.num_ranks)
        self._rows = GrainRows(self._pool.parts, self._plan.source)

    async def receive_hello(self, connection: Connection) -> Frame:
        """Returns the receiver's first frame, and takes what came along. Raises TransferError."""
        return await connection.receive()

    def make_ready(self, targets: RowIds) -> None:
        """A hand-off into these blocks of the peer has begun: what this end will write can be mapped. Never waits."""

    def reserve(self, num_blocks: int) -> asyncio.Future[Loan]:
        """Returns a future of a loan for one WRITE of 1 to `num_blocks` blocks; see `ring.Ring`.

        A caller without use for the loan calls `ring.give_up`. The loan is released when the WRITE was answered or its
        hand-off has ended; the lane may do so earlier.
        """
        return self._ring.take(num_blocks)

    async def place(self, sources: Sequence[BlockId], targets: Sequence[BlockId], loan: Loan) -> tuple[int, ...]:
        """Before the WRITE: stages the sources if need be and, if this end writes the peer's memory, copies them.

        Returns the 8 bytes that verify each block. Never cancelled; raises TransferError.
        """
        loan.num_spans = len(sources)
        if self._work is not None:
            return await self._work.checksums(sources)
        rows = loan.rows_for(sources)
        await self._pool.stage(sources, rows)
        return await self._pool.checksums(self._rows, rows)

    def announce(
        self, connection: Connection, write: Frame, sources: Sequence[BlockId], loan: Loan
    ) -> asyncio.Future[None] | None:
        """Queues the WRITE and whatever has to follow it. Never waits.

        Returns a future, done when the sources may be reused; None = they may be already.
        """
        return connection.send(write)


class ReceivingLane(Lane):
    """The receiver's end."""

    peer_writes = False
    """Whether the peer itself writes into the pool, so that it has to prove that it stopped.

    False = only `receive` and `settle` write, and nothing is written once they have returned.
    """
    places: tuple[Place, ...] = WHOLE
    """What `checksums` returns of each block: the grains in these places."""

    def attach(self, theirs: Hello, verify: str) -> None:
        """Hands were shaken: blocks are verified by `verify`. Raises TransferError."""
        self._plan = self._follow(theirs.num_ranks, len(self._pool.parts))
        spans = self._plan.target if self.peer_writes else distinct(self._plan.target)
        self.places = places(spans)
        self._rows = GrainRows(self._pool.parts, spans)

    def send_hello(self, connection: Connection, hello: Frame) -> None:
        """Sends this side's first frame, and what has to come along with it. Raises TransferError."""
        connection.send(hello)

    def expect(self, num_transfers: int) -> None:
        """`num_transfers` are open from now on; while none is, the peer writes nothing. Never waits."""

    async def receive(
        self, connection: Connection, blocks: Sequence[BlockId], num_bytes: int, wanted: Callable[[], bool]
    ) -> None:
        """The receive hook: takes the payload of one WRITE, into `blocks` while `wanted()`, else nowhere.

        `blocks` is empty if the WRITE was not accepted; `num_bytes` come all the same. Leaves `connection` at the
        next frame. Nothing else reads `connection` meanwhile, so the deadline is the lane's. Raises PeerLost.
        """

    async def settle(self, blocks: Sequence[BlockId]) -> None:
        """Brings verified blocks into the pool itself. Raises TransferError.

        Even a cancelled call returns only after its copy has ended.
        """

    async def peer_dead(self) -> None:
        """Returns once the peer is proven unable to write; called only if `peer_writes`.

        The one wait without a deadline: blocks stay quarantined for exactly so long. Cancelled if the peer says BYE.
        """


@dataclass(frozen=True, slots=True)
class Acceptor:
    """A transport's listening end; the receiver accepts connections from `sock`."""

    sock: socket.socket
    """Listening, non-blocking."""
    fields: Fields
    """For the endpoint: all that a sender needs to dial. No two receivers have equal ones at a time."""
    accept: Callable[[socket.socket], ReceivingLane]
    """This end of a new connection. Raises TransferError if the peer is not welcome, TransportFull if it would be."""


class Transport(Protocol):
    """One way to move payload; holds no state of any pool or connection."""

    name: str
    """The transport's name in `--transport`."""
    splits: bool
    """Whether the transport moves blocks between pools that ranks divide."""
    gpu_each: bool
    """Whether the transport connects only pools that lie on different GPUs."""
    dial_s: float | None
    """Longest time from `dial` to `prepare`. None = a lease, which a hand-off can wait for; else `auto` hands over by
    another transport meanwhile."""

    def probe(self, device: torch.device) -> TransportStatus:
        """Whether the transport works on this machine for pools on `device`."""

    def listen(self, pool: Pool, options: ListenOptions) -> Acceptor:
        """Listens for `pool`. Raises ConfigError if the transport cannot listen, or not for this pool."""

    def unreachable(self, pool: Pool, fields: Fields) -> str | None:
        """Why `auto` should not try the receiver that has these endpoint fields; None = it should.

        A clause without a subject's name ("it is on another machine"), for log and errors; it never raises.
        """

    async def dial(self, pool: Pool, fields: Fields, tls: ClientTls | None) -> tuple[socket.socket, SendingLane]:
        """Connects; the caller sets the deadline, and closes both. Raises OSError, TransferError, TransportFull."""
