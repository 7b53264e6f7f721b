"""One offer as its receiver sees it: what is claimed, what is verified, who listens. Pure.

States are `lifecycle.TransferState`. The table in `offers` is the only one that moves them.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from kvtransfer.base import HandoffListener
from kvtransfer.messages import Commit, Write, digest_of
from kvtransfer.ticket import Ticket
from shell.clock import Deadline
from tandem.errors import ChecksumMismatch, FrameError, TransferError
from tandem.lifecycle import TRANSFER_MOVES, TransferState, advance
from tandem.types import BlockId


class Writer(Protocol):
    """Whoever can write into the blocks of an open offer."""

    def stop_writing(self, number: int, error: TransferError) -> bool:
        """Asks it to stop. True if it cannot write already; else `writer_stopped` must follow."""


class Incoming:
    """The receiver's record of a ticket."""

    def __init__(self, ticket: Ticket, listener: HandoffListener, show_by: Deadline) -> None:
        self.ticket = ticket
        self.listener = listener
        self.show_by = show_by
        self.writer: Writer | None = None
        self.state = TransferState.OFFERED
        self._checksums = np.zeros(len(ticket.blocks), np.uint64)
        """Checksums as announced, in the offer's order."""
        self._is_claimed = np.zeros(len(ticket.blocks), bool)
        self._num_writes = 0
        self._num_verified = 0

    def move(self, to: TransferState) -> None:
        """Raises InternalError on a move that the table of states does not have."""
        self.state = advance(TRANSFER_MOVES, self.state, to)

    def claim(self, seq: int, write: Write) -> tuple[BlockId, ...]:
        """Takes positions for a WRITE, each once. Returns their blocks; raises FrameError."""
        if seq != self._num_writes:
            raise FrameError(f"WRITE {seq} came where {self._num_writes} was due")
        first, end = self.ticket.first_block, self.ticket.end
        if not first <= write.first <= write.end <= end:
            raise FrameError(f"WRITE of positions {write.first}:{write.end} leaves the offer of {first}:{end}")
        span = slice(write.first - first, write.end - first)
        if self._is_claimed[span].any():
            raise FrameError(f"WRITE of positions {write.first}:{write.end} repeats a block")
        self._checksums[span], self._is_claimed[span] = write.checksums, True
        self._num_writes += 1
        return tuple(self.ticket.blocks.block_ids[span].tolist())

    def verify(self, write: Write, found: tuple[int, ...]) -> None:
        """Compares what lies in the blocks with what was announced. Raises ChecksumMismatch."""
        if found != write.checksums:
            differs = next(i for i, pair in enumerate(zip(write.checksums, found, strict=True)) if pair[0] != pair[1])
            raise ChecksumMismatch(f"block at position {write.first + differs} differs from what was announced")
        self._num_verified += len(found)

    def check_commit(self, commit: Commit) -> None:
        """Raises FrameError unless every block is verified, ChecksumMismatch on another digest."""
        if commit.num_writes != self._num_writes:
            raise FrameError(f"COMMIT counts {commit.num_writes} writes, {self._num_writes} came")
        if self._num_verified != len(self._checksums):
            raise FrameError(f"COMMIT after {self._num_verified} of {len(self._checksums)} blocks")
        if commit.digest != digest_of(self._checksums[self._is_claimed]):
            raise ChecksumMismatch("digest over all blocks differs")
