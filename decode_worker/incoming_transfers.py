"""Hand-offs into this pool: blocks promised to a prefill worker, until they are a request's or free.

State of one transfer (`tandem.lifecycle.TRANSFER_MOVES`), and of its blocks:

    OFFERED      RESERVED      the ticket is out
    RECEIVING    RECEIVING     a writer has shown it
    COMMITTED    LIVE          every block verified; they are the request's from now on
    QUARANTINED  QUARANTINED   given up under a live writer
    FAILED       FREE

Only blocks that the pool lacks are received: what its cache knows of the prefix, the group takes a hold on when the
offer is made, and whoever ends the request releases it with all else that the group holds.

A block leaves quarantine only when the receiver says that its writer has stopped. Only
`on_committed` makes a request runnable, so nothing unverified is ever decoded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from engine.sequence import new_block_table
from kvtransfer.base import BlockRefs, Offer, Receiver
from shell.clock import Deadline
from shell.telemetry.events import Transferred, TransferStarted
from shell.telemetry.logging import get_logger
from tandem.errors import FrameError, TandemError, TicketRefused, TransferError
from tandem.first_tokens import FirstTokens, NextTokens, decode_first_tokens
from tandem.lifecycle import TRANSFER_MOVES, BlockState, TransferState, advance
from tandem.types import BlockId
from worker.ports import WorkerParts
from worker.request import Request

_log = get_logger(__name__)


TICKET_S = 15.0
"""From a ticket to its being shown. A backstop, as is the next: a dead router, peer or deadline ends it sooner."""
HANDOFF_S = 900.0
"""From a ticket to the commit: the prompt's computation, which has begun, and the transfer. Reached only where the
prefill worker says of a prompt that it is under way and never ends it."""


class TransferOwner(Protocol):
    """Learns how a transfer ended: by exactly one of the first two calls, unless the transfer was withdrawn."""

    def received(self, request: Request, block_ids: Sequence[BlockId], first_tokens: FirstTokens) -> None:
        """Verified: LIVE blocks that hold what the group lacked of its prefix, for the owner to release; and one token
        per choice due, all that a single one has, or the first candidates of a beam search.
        """

    def transfer_failed(self, request: Request, error: TandemError) -> None:
        """Nothing of it may be used; its blocks are not the owner's to release."""

    def blocks_freed(self) -> None:
        """Blocks of a failed transfer are free again."""


class IncomingTransfers:
    """The transfers into a pool that may still make a request runnable."""

    def __init__(self, parts: WorkerParts, receiver: Receiver, owner: TransferOwner) -> None:
        self.pool = parts.cache.pool
        self.clock = parts.clock
        self.owner = owner
        self.vocab_size = parts.validator.vocab_size
        self._cache = parts.cache
        self._receiver = receiver
        self._transfers: dict[Request, tuple[IncomingTransfer, Offer]] = {}

    def __len__(self) -> int:
        return len(self._transfers)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._transfers)

    @property
    def num_seqs(self) -> int:
        """Sequences that wait for transfers."""
        return sum(request.group.num_seats for request in self._transfers)

    @property
    def requests(self) -> Collection[Request]:
        """Requests that wait for transfers."""
        return self._transfers.keys()

    def offer(self, request: Request) -> Offer:
        """Attaches what is known of the group's prefix, reserves blocks for the rest and mints a ticket for them.

        Raises PoolExhausted if there are not enough, or what the receiver raises; the group keeps what it holds then.
        """
        request.group.attach(self._cache)
        prefix = request.group.prefix
        num_held = len(prefix.block_table)
        num_blocks = prefix.blocks_wanted(prefix.num_remaining_tokens, self.pool.block_size)
        block_ids = new_block_table(self._cache.allocate(num_blocks, BlockState.RESERVED))
        transfer = IncomingTransfer(request, block_ids, Deadline.after(self.clock, HANDOFF_S), self)
        refs = BlockRefs(np.array(block_ids, np.uint32), self.pool.generations(block_ids))
        try:
            offer = self._receiver.offer(refs, transfer, TICKET_S, num_held)
        except TandemError:
            self.pool.release(block_ids)
            raise
        self._transfers[request] = (transfer, offer)
        return offer

    def withdraw(self, request: Request) -> None:
        """The request is gone: fails its transfer without telling the owner. Idempotent."""
        if request in self._transfers:
            _, offer = self._transfers.pop(request)
            self._receiver.withdraw(offer.transfer_id)

    def expire(self) -> None:
        """Fails transfers whose time has run out: tickets never shown, writers that do not commit."""
        self._receiver.reap()
        for request, (transfer, _) in list(self._transfers.items()):
            if transfer.commit_by.passed:
                self.withdraw(request)
                error = TransferError(f"no commit within {HANDOFF_S:g} s")
                self.owner.transfer_failed(request, error)

    def end(self, request: Request) -> bool:
        """Its transfer is over; False if the request has gone meanwhile."""
        return self._transfers.pop(request, None) is not None


class IncomingTransfer:
    """The `HandoffListener` of a hand-off."""

    def __init__(
        self, request: Request, block_ids: Sequence[BlockId], commit_by: Deadline, transfers: IncomingTransfers
    ) -> None:
        """`block_ids` are RESERVED, and this transfer's until its end."""
        self.commit_by = commit_by
        self._request = request
        self._block_ids = block_ids
        self._all = transfers
        self._state = TransferState.OFFERED
        self._shown_s = 0.0

    def on_receiving(self) -> None:
        """Moves the blocks under the writer. Raises TicketRefused if the offer is over or taken."""
        if self._state is not TransferState.OFFERED:
            raise TicketRefused(f"the offer is already {self._state}")
        self._advance(TransferState.RECEIVING)
        self._all.pool.start_receiving(self._block_ids)
        self._shown_s = self._all.clock.now_s()
        self._request.events.emit(TransferStarted())

    def on_committed(self, first_token_payload: bytes) -> None:
        """Hands the verified blocks to the owner, or frees them if the request is gone or the payload is bad."""
        self._advance(TransferState.COMMITTED)
        self._all.pool.seal(self._block_ids)
        request = self._request
        if not self._all.end(request):
            self._release()
            return
        try:
            first_tokens = self._first_tokens(first_token_payload)
        except FrameError as error:
            self._release()
            self._all.owner.transfer_failed(request, error)
            return
        request.events.emit(Transferred(0, self._all.clock.now_s() - self._shown_s, None))
        try:
            self._all.owner.received(request, self._block_ids, first_tokens)
        except Exception as error:  # noqa: BLE001 - a bug, and this request's alone
            _log.exception("a hand-off could not be taken over", request_id=request.spec.request_id)
            tables = request.group.take_blocks()
            if not {block for table in tables for block in table}.issuperset(self._block_ids):  # not taken over yet
                tables.append(list(self._block_ids))
            for table in tables:
                self._all.pool.release(table)
            failure = TransferError(f"the sequence could not be taken over: {type(error).__name__}")
            self._all.owner.transfer_failed(request, failure)

    def on_failed(self, error: TransferError) -> None:
        """Frees blocks that nobody could write into, quarantines all other blocks."""
        if self._state is TransferState.OFFERED:
            self._advance(TransferState.FAILED)
            self._release()
        elif self._state is TransferState.RECEIVING:
            self._advance(TransferState.QUARANTINED)
            self._all.pool.release(self._block_ids)
        if self._all.end(self._request):
            self._all.owner.transfer_failed(self._request, error)

    def on_writer_stopped(self) -> None:
        """Frees quarantined blocks; all other blocks are free already."""
        if self._state is TransferState.QUARANTINED:
            self._advance(TransferState.FAILED)
            self._all.pool.writer_stopped(self._block_ids)
            self._all.owner.blocks_freed()

    def _first_tokens(self, payload: bytes) -> FirstTokens:
        """Raises FrameError unless it brings one token of the vocabulary for each choice that is due, the next ones of
        every choice, or candidates.
        """
        first = decode_first_tokens(payload)
        is_search = self._request.spec.sampling.beam_width > 0
        if isinstance(first, Mapping | NextTokens) is is_search:
            raise FrameError(f"first {'tokens' if is_search else 'candidates'}, which are not what is due")
        highest: int
        if isinstance(first, NextTokens):
            highest = max(map(max, self._request.group.unknown_tokens(first).values()))
        elif isinstance(first, Mapping):
            due = {choice.index for choice in self._request.group.prefix.drawers}
            if first.keys() != due:
                raise FrameError(f"first tokens of choices {sorted(first)}, not of {sorted(due)}")
            highest = max(first.values(), default=0)
        else:
            highest = max(token_id for token_id, _ in first)
        if highest >= self._all.vocab_size:
            raise FrameError(f"first token {highest} is not in the vocabulary")
        return first

    def _advance(self, to: TransferState) -> None:
        self._state = advance(TRANSFER_MOVES, self._state, to)

    def _release(self) -> None:
        self._all.pool.release(self._block_ids)
        self._all.owner.blocks_freed()
