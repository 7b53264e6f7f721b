"""A hand-off within one process and one loop: no sockets, real rules.

Tickets, states, checksums, staging and listeners are those of the real receiver (`offers`, `pool`); only the
connection is missing. `Faults` says what goes wrong, by count or position, never by chance.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from kvtransfer.base import BlockRef, Fingerprints, HandoffListener, Offer, PoolMemory, TransferReport
from kvtransfer.handshake import Hello, compare
from kvtransfer.messages import Commit, Write, digest_of
from kvtransfer.offers import OfferTable
from kvtransfer.pool import Pool
from kvtransfer.rows import ByteRows, Rows
from kvtransfer.ticket import Ticket
from shell.clock import Clock
from tandem.errors import PeerLost, TransferError
from tandem.types import BlockId

NAME = "inproc"


@dataclass(frozen=True)
class _Speaker:
    name: str = NAME
    verify: tuple[str, ...] = ("xxh3-64",)
    details: Mapping[str, str] = field(default_factory=dict)


SPEAKER = _Speaker()


@dataclass(slots=True)
class Faults:
    """What goes wrong on a sender's way; may be changed between calls."""

    drop_pushes: bool = False
    """Blocks are neither written nor announced."""
    corrupt_position: int | None = None
    """This position's first byte is flipped after its checksum was taken."""
    die_after_pushes: int | None = None
    """The sender's process 'dies' when it begins one push more than this."""
    gate: asyncio.Event | None = None
    """Every push waits for it before writing."""
    refuse_open: TransferError | None = None
    """`open` raises it."""
    num_pushes: int = field(default=0, init=False)


class InprocNetwork:
    """Finds receivers by their endpoint; one per test."""

    def __init__(self) -> None:
        self._receivers: dict[bytes, InprocReceiver] = {}

    def add(self, endpoint: bytes, receiver: InprocReceiver) -> None:
        """Makes a receiver reachable."""
        self._receivers[endpoint] = receiver

    def remove(self, endpoint: bytes) -> None:
        """Makes it unreachable. Idempotent."""
        self._receivers.pop(endpoint, None)

    def find(self, endpoint: bytes) -> InprocReceiver:
        """Raises PeerLost if nobody is there."""
        if endpoint not in self._receivers:
            raise PeerLost("cannot connect: no such receiver")
        return self._receivers[endpoint]


class InprocReceiver:
    """Implements `base.Receiver`."""

    def __init__(self, memory: PoolMemory, fingerprints: Fingerprints, clock: Clock, network: InprocNetwork) -> None:
        self.pool = Pool(memory, fingerprints)
        self.table = OfferTable(memory.incarnation, fingerprints.layout.fingerprint(), self.pool.num_blocks, clock)
        self._network = network
        self._endpoint = f"inproc:{memory.incarnation}".encode()

    @property
    def num_live(self) -> int:
        """Offers that have not ended."""
        return len(self.table)

    async def start(self) -> None:
        """Becomes reachable."""
        self._network.add(self._endpoint, self)

    def offer(
        self, blocks: Sequence[BlockRef], listener: HandoffListener, expires_in_s: float, first_block: int = 0
    ) -> Offer:
        """See `base.Receiver.offer`."""
        ticket = self.table.mint(blocks, listener, expires_in_s, first_block)
        return Offer(ticket.transfer_id, ticket.encode(), self._endpoint)

    def withdraw(self, transfer_id: str) -> None:
        """See `base.Receiver.withdraw`."""
        self.table.withdraw(transfer_id)

    def reap(self) -> None:
        """See `base.Receiver.reap`."""
        self.table.reap()

    async def stop(self) -> None:
        """Fails every offer and becomes unreachable."""
        self._network.remove(self._endpoint)
        self.table.fail_all(TransferError("the receiver stops"))


class InprocSender:
    """Implements `base.Sender`."""

    def __init__(
        self,
        memory: PoolMemory,
        fingerprints: Fingerprints,
        clock: Clock,
        network: InprocNetwork,
        faults: Faults | None = None,
    ) -> None:
        self._pool = Pool(memory, fingerprints)
        self._clock = clock
        self._network = network
        self._faults = faults or Faults()
        self._handoffs: list[InprocHandoff] = []

    async def open(self, ticket: bytes, endpoint: bytes, timeout_s: float) -> InprocHandoff:
        """See `base.Sender.open`."""
        del timeout_s  # nothing here waits
        if self._faults.refuse_open is not None:
            raise self._faults.refuse_open
        receiver = self._network.find(endpoint)
        compare(Hello.of(self._pool, SPEAKER), Hello.of(receiver.pool, SPEAKER))
        handoff = InprocHandoff(Ticket.decode(ticket), self._pool, receiver, self._clock, self._faults)
        receiver.table.show(handoff.number, ticket, handoff)
        self._handoffs.append(handoff)
        return handoff

    async def stop(self) -> None:
        """Aborts every hand-off."""
        for handoff in self._handoffs:
            await handoff.abort()
        self._handoffs.clear()


class InprocHandoff:
    """Implements `base.Handoff` on one side and `incoming.Writer` on the other."""

    def __init__(self, ticket: Ticket, source: Pool, receiver: InprocReceiver, clock: Clock, faults: Faults) -> None:
        self._ticket = ticket
        self._source = source
        self._target = receiver.pool
        self._table = receiver.table
        self._clock = clock
        self._faults = faults
        self._busy_s = 0.0
        self._checksums: dict[int, int] = {}
        self._num_writes = 0
        self._writing = 0
        self._error: TransferError | None = None
        self._report: TransferReport | None = None

    @property
    def number(self) -> int:
        """The transfer's number."""
        return self._ticket.number

    @property
    def first_block(self) -> int:
        """See `base.Handoff.first_block`."""
        return self._ticket.first_block

    def stop_writing(self, number: int, error: TransferError) -> bool:
        """The receiver wants it to stop; True if no push is under way."""
        del number
        self._error = self._error or error
        return self._writing == 0

    async def push(self, first: int, source_blocks: tuple[BlockId, ...]) -> None:
        """See `base.Handoff.push`."""
        self._raise_if_ended()
        self._maybe_die()
        with self._under_way():
            if self._faults.gate is not None:
                await self._faults.gate.wait()
            self._raise_if_ended()
            if source_blocks and not self._faults.drop_pushes:
                await self._write(first, source_blocks)
        self._raise_if_ended()

    async def commit(self, first_token_payload: bytes) -> TransferReport:
        """See `base.Handoff.commit`."""
        if self._report is not None:
            return self._report
        self._raise_if_ended()
        digest = digest_of([self._checksums[position] for position in sorted(self._checksums)])
        self._table.commit(self.number, Commit(self._num_writes, digest, first_token_payload))
        num_blocks = len(self._checksums)
        self._report = TransferReport(NAME, num_blocks, num_blocks * self._source.block_bytes, self._busy_s)
        return self._report

    async def abort(self) -> None:
        """See `base.Handoff.abort`."""
        if self._report is None:
            self._end(TransferError("the sender gave up"))

    async def _write(self, first: int, sources: tuple[BlockId, ...]) -> None:
        started_s = self._clock.now_s()
        sent = await self._read(sources)
        self._raise_if_ended()
        write = Write(first, _checksums(sent))
        targets = self._table.claim(self.number, self._num_writes, write)
        if targets is None:
            return
        self._num_writes += 1
        for position, row in enumerate(sent, first):
            if position == self._faults.corrupt_position:
                row[0] ^= 0xFF
            self._checksums[position] = write.checksums[position - first]
        if self._table.verify(self.number, write, _checksums(sent)):
            await self._settle(sent, targets)
        self._busy_s += self._clock.now_s() - started_s

    async def _read(self, sources: tuple[BlockId, ...]) -> ByteRows:
        rows = np.empty((len(sources), self._source.block_bytes), np.uint8)
        await self._source.copy_to(Rows(rows), sources, range(len(sources)))
        return rows

    async def _settle(self, sent: ByteRows, targets: tuple[BlockId, ...]) -> None:
        pool = self._target
        while targets:
            loan = await pool.arriving.taken(len(targets))
            due, targets = targets[: loan.num_blocks], targets[loan.num_blocks :]
            rows = loan.rows_for(due)
            pool.rows.array[list(rows)], sent = sent[: len(rows)], sent[len(rows) :]
            try:
                await pool.settle(rows, due)
            except TransferError as error:
                self._table.fail(self.number, error)
            finally:
                loan.release()

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        self._writing += 1
        try:
            yield
        finally:
            self._writing -= 1
            if self._writing == 0 and self._error is not None:
                self._table.writer_stopped(self.number)

    def _maybe_die(self) -> None:
        self._faults.num_pushes += 1
        limit = self._faults.die_after_pushes
        if limit is not None and self._faults.num_pushes > limit:
            self._end(PeerLost("the sender's process ended"))
            self._raise_if_ended()

    def _end(self, error: TransferError) -> None:
        self._error = self._error or error
        self._table.fail(self.number, error)

    def _raise_if_ended(self) -> None:
        if self._error is not None:
            raise self._error


def _checksums(rows: ByteRows) -> tuple[int, ...]:
    return Rows(rows).checksums(range(len(rows)))
