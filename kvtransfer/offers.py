"""The table of offers: the truth about every ticket that was minted and has not ended. Pure.

Mints and checks tickets, moves transfers through `lifecycle.TRANSFER_MOVES`, and tells each
offer's listener its end exactly once. Knows no sockets: connections show tickets, report
writes, and are asked through `Writer` to stop.

    show                OFFERED → RECEIVING
    commit              RECEIVING → COMMITTED | FAILED
    fail                OFFERED → FAILED; RECEIVING → FAILED, or QUARANTINED while the writer can still write
    writer_stopped      QUARANTINED → FAILED

Every method is a no-op on an offer that has ended, so late messages change nothing. A listener that raises what the
contract does not foresee fails its own offer and nothing else.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from kvtransfer.base import BlockRef, BlockRefs, HandoffListener
from kvtransfer.messages import Commit, Write, digest_of
from kvtransfer.plan import WHOLE, Place
from kvtransfer.ticket import MAX_BLOCKS, NONCE_BYTES, Ticket, check_shown
from shell.clock import Clock, Deadline
from tandem.errors import ChecksumMismatch, FrameError, InternalError, TicketRefused, TransferError
from tandem.lifecycle import TRANSFER_MOVES, TransferState, advance
from tandem.logger import get_logger
from tandem.types import BlockId, Incarnation

_log = get_logger(__name__)


class Writer(Protocol):
    """Whoever can write into the blocks of an open offer."""

    def stop_writing(self, number: int, error: TransferError) -> bool:
        """Asks it to stop. True if it cannot write already; else `writer_stopped` must follow."""


class Incoming:
    """The receiver's record of a ticket; `OfferTable` alone moves its state."""

    def __init__(self, ticket: Ticket, listener: HandoffListener, show_by: Deadline) -> None:
        self.ticket = ticket
        self.listener = listener
        self.show_by = show_by
        self.writer: Writer | None = None
        self.state = TransferState.OFFERED
        self.places: Sequence[Place] = WHOLE
        """Places whose grains are verified, of each block."""
        self._checksums = np.zeros((len(ticket.blocks), 1), np.uint64)
        """Checksums as announced, in the offer's order: `[n, grains]`."""
        self._is_claimed = np.zeros(len(ticket.blocks), bool)
        self._num_writes = 0
        self._num_verified = 0

    def open(self, writer: Writer, places: Sequence[Place]) -> None:
        """The ticket was shown by `writer`."""
        self.writer, self.places = writer, places
        num_grains = 1 + max(place.grain for place in places)
        self._checksums = np.zeros((len(self.ticket.blocks), num_grains), np.uint64)

    def move(self, to: TransferState) -> None:
        """Raises InternalError on a move that the table of states does not have."""
        self.state = advance(TRANSFER_MOVES, self.state, to)

    def claim(self, seq: int, write: Write) -> tuple[BlockId, ...]:
        """Takes positions for a WRITE, each once. Returns their blocks; raises FrameError."""
        if seq != self._num_writes:
            raise FrameError(f"WRITE {seq} came where {self._num_writes} was due")
        num_grains = self._checksums.shape[1]
        if write.num_grains != num_grains:
            raise FrameError(f"WRITE of blocks in {write.num_grains} grains where {num_grains} were agreed")
        first, end = self.ticket.first_block, self.ticket.end
        if not first <= write.first <= write.end <= end:
            raise FrameError(f"WRITE of positions {write.first}:{write.end} leaves the offer of {first}:{end}")
        span = slice(write.first - first, write.end - first)
        if self._is_claimed[span].any():
            raise FrameError(f"WRITE of positions {write.first}:{write.end} repeats a block")
        self._checksums[span] = np.array(write.checksums, np.uint64).reshape(-1, num_grains)
        self._is_claimed[span] = True
        self._num_writes += 1
        return tuple(self.ticket.blocks.block_ids[span].tolist())

    def verify(self, write: Write, found: tuple[int, ...]) -> None:
        """Compares what lies in the blocks with what was announced. Raises ChecksumMismatch."""
        if found != write.checksums:  # equal: nothing lies in two places
            self._compare(write, found)
        self._num_verified += write.num_blocks

    def _compare(self, write: Write, found: tuple[int, ...]) -> None:
        announced = np.array(write.checksums, np.uint64).reshape(write.num_blocks, -1)
        expected = announced[:, [place.grain for place in self.places]]
        differs = np.array(found, np.uint64).reshape(expected.shape) != expected
        for block, place in np.argwhere(differs)[:1].tolist():
            where = f" of rank {self.places[place].rank}" if len(self.places) > 1 else ""
            raise ChecksumMismatch(f"block{where} at position {write.first + block} differs from what was announced")

    def check_commit(self, commit: Commit) -> None:
        """Raises FrameError unless every block is verified, ChecksumMismatch on another digest."""
        if commit.num_writes != self._num_writes:
            raise FrameError(f"COMMIT counts {commit.num_writes} writes, {self._num_writes} came")
        if self._num_verified != len(self._checksums):
            raise FrameError(f"COMMIT after {self._num_verified} of {len(self._checksums)} blocks")
        if commit.digest != digest_of(self._checksums[self._is_claimed]):
            raise ChecksumMismatch("digest over all blocks differs")


class OfferTable:
    """Offers by number. INVARIANT: no block is named by two of them (checked by `mint`)."""

    def __init__(self, incarnation: Incarnation, layout_fingerprint: str, num_blocks: int, clock: Clock) -> None:
        self._incarnation = incarnation
        self._layout_fingerprint = layout_fingerprint
        self._num_blocks = num_blocks
        self._clock = clock
        self._offers: dict[int, Incoming] = {}
        self._lent = np.zeros(num_blocks, np.bool_)
        """By block: whether an offer names this block."""
        self.num_shown = 0
        """Tickets accepted since the start."""

    def __len__(self) -> int:
        return len(self._offers)

    def mint(
        self, blocks: Sequence[BlockRef], listener: HandoffListener, expires_in_s: float, first_block: int = 0
    ) -> Ticket:
        """A new offer. Raises InternalError if the blocks are not the owner's to offer."""
        refs = BlockRefs.of(blocks)
        block_ids = refs.block_ids.astype(np.intp)
        if len(refs) and block_ids.max() >= self._num_blocks:
            raise InternalError(f"offer leaves the pool of {self._num_blocks} blocks")
        num_distinct = int(np.count_nonzero(np.bincount(block_ids)))
        if first_block < 0 or not 0 < first_block + len(refs) <= MAX_BLOCKS or num_distinct != len(refs):
            raise InternalError(f"offer of {len(refs)} blocks from {first_block}, {num_distinct} distinct")
        if self._lent[block_ids].any():
            raise InternalError("offer names blocks that another transfer may still write")
        ticket = Ticket(
            number=self._new_number(),
            incarnation=self._incarnation,
            nonce=secrets.token_bytes(NONCE_BYTES),
            layout_fingerprint=self._layout_fingerprint,
            expires_in_ms=max(0, round(expires_in_s * 1000)),
            first_block=first_block,
            blocks=refs,
        )
        self._offers[ticket.number] = Incoming(ticket, listener, Deadline.after(self._clock, expires_in_s))
        self._lent[block_ids] = True
        return ticket

    def show(self, number: int, shown: bytes, writer: Writer, places: Sequence[Place] = WHOLE) -> None:
        """Opens the offer for `writer`, who fills these places of each block.

        Raises TicketRefused, or what its listener refuses with.

        A ticket that is not exactly what was minted leaves the offer as it was.
        """
        incoming = self._offers.get(number)
        if incoming is None:
            raise TicketRefused(f"transfer {number:016x} is unknown or has ended")
        check_shown(shown, incoming.ticket)
        if incoming.state is not TransferState.OFFERED:
            raise TicketRefused(f"ticket of transfer {number:016x} was shown before")
        if incoming.show_by.passed:
            expired = TicketRefused(f"ticket of transfer {number:016x} has expired")
            self.fail(number, expired)
            raise expired
        incoming.move(TransferState.RECEIVING)
        try:
            incoming.listener.on_receiving()
        except Exception as error:  # a refusal, or the listener's bug
            refusal = _told(number, error)
            self._end_failed(number, incoming, refusal)
            raise refusal from error
        incoming.open(writer, places)
        self.num_shown += 1

    def is_receiving(self, number: int) -> bool:
        """Whether bytes may still be taken for the offer."""
        incoming = self._offers.get(number)
        return incoming is not None and incoming.state is TransferState.RECEIVING

    def claim(self, number: int, seq: int, write: Write) -> tuple[BlockId, ...] | None:
        """Blocks of a WRITE; None if it is late, or wrong: then the offer has failed."""
        incoming = self._receiving(number)
        if incoming is None:
            return None
        try:
            return incoming.claim(seq, write)
        except TransferError as error:
            self.fail(number, error)
            return None

    def verify(self, number: int, write: Write, found: tuple[int, ...]) -> bool:
        """Accepts what lies in a WRITE's blocks; False if it is late, or differs: then it failed."""
        incoming = self._receiving(number)
        if incoming is None:
            return False
        try:
            incoming.verify(write, found)
        except TransferError as error:
            self.fail(number, error)
            return False
        return True

    def commit(self, number: int, commit: Commit) -> None:
        """Ends it well, or raises the TransferError that it failed with.

        A COMMIT says that the writer has stopped, so a failed one leaves nothing to wait for.
        """
        incoming = self._receiving(number)
        if incoming is None:
            raise TransferError(f"transfer {number:016x} has ended")
        try:
            incoming.check_commit(commit)
        except TransferError as error:
            self._end_failed(number, incoming, error)
            raise
        self._forget(number, incoming)
        try:
            incoming.listener.on_committed(commit.first_token_payload)
        except Exception as error:
            failure = _told(number, error)
            self._end_failed(number, incoming, failure)
            raise failure from error
        incoming.move(TransferState.COMMITTED)

    def fail(self, number: int, error: TransferError) -> None:
        """Ends it badly now; its blocks stay lent until the writer cannot write."""
        incoming = self._offers.get(number)
        if incoming is None or incoming.state is TransferState.QUARANTINED:
            return
        if incoming.writer is None or incoming.writer.stop_writing(number, error):
            self._end_failed(number, incoming, error)
            return
        incoming.move(TransferState.QUARANTINED)
        _tell(number, lambda: incoming.listener.on_failed(error))

    def writer_stopped(self, number: int) -> None:
        """Ends a failed offer whose writer has proven that no write can follow."""
        incoming = self._offers.get(number)
        if incoming is None or incoming.state is not TransferState.QUARANTINED:
            return
        incoming.move(TransferState.FAILED)
        self._forget(number, incoming)
        _tell(number, incoming.listener.on_writer_stopped)

    def withdraw(self, transfer_id: str) -> None:
        """The request is gone. Unknown ids are no-ops."""
        try:
            number = int(transfer_id, 16)
        except ValueError:
            return
        self.fail(number, TransferError("the receiver withdrew the offer"))

    def reap(self) -> None:
        """Fails every offer whose ticket was not shown in time."""
        for number, incoming in list(self._offers.items()):
            if incoming.state is TransferState.OFFERED and incoming.show_by.passed:
                self.fail(number, TransferError(f"ticket of transfer {number:016x} expired unused"))

    def fail_all(self, error: TransferError) -> None:
        """Fails every offer."""
        for number in list(self._offers):
            self.fail(number, error)

    def check_invariants(self) -> None:
        """Raises InternalError if lent blocks and offers disagree, or an ended offer is kept."""
        named = [block for incoming in self._offers.values() for block in incoming.ticket.blocks.block_ids.tolist()]
        lent = np.flatnonzero(self._lent).tolist()
        if sorted(named) != lent:
            raise InternalError(f"{len(lent)} blocks are lent, offers name {len(named)}")
        ended = (TransferState.COMMITTED, TransferState.FAILED)
        if any(incoming.state in ended for incoming in self._offers.values()):
            raise InternalError("an ended offer is still in the table")

    def _receiving(self, number: int) -> Incoming | None:
        incoming = self._offers.get(number)
        return incoming if incoming is not None and incoming.state is TransferState.RECEIVING else None

    def _end_failed(self, number: int, incoming: Incoming, error: TransferError) -> None:
        incoming.move(TransferState.FAILED)
        self._forget(number, incoming)
        _tell(number, lambda: incoming.listener.on_failed(error))
        _tell(number, incoming.listener.on_writer_stopped)

    def _forget(self, number: int, incoming: Incoming) -> None:
        self._offers.pop(number, None)
        self._lent[incoming.ticket.blocks.block_ids] = False

    def _new_number(self) -> int:
        while (number := secrets.randbits(63)) in self._offers or number == 0:
            pass
        return number


def _tell(number: int, call: Callable[[], None]) -> None:
    """Tells a listener of a failure: what it makes of that is nobody else's affair."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the listener's bug
        _told(number, error)


def _told(number: int, error: Exception) -> TransferError:
    """What a hand-off fails with whose listener raised `error`."""
    if isinstance(error, TransferError):
        return error
    _log.error("kv listener broke", transfer=f"{number:016x}", exc_info=error)
    return TransferError(f"the listener of transfer {number:016x} broke: {type(error).__name__}")
