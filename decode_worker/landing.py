"""Hand-offs into this pool: blocks promised to a prefill worker, until they are a sequence's or free.

State of one landing (`tandem.lifecycle.TRANSFER_MOVES`), and of its blocks:

    OFFERED      RESERVED      the ticket is out
    RECEIVING    RECEIVING     a writer has shown it
    COMMITTED    LIVE          every block verified; they are the sequence's from now on
    QUARANTINED  QUARANTINED   given up under a live writer
    FAILED       FREE

A block leaves quarantine only when the receiver says that its writer has stopped. Only
`on_committed` makes a sequence, so nothing unverified is ever decoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from decode_worker.arrival import Arrival
from engine.block_pool import BlockPool
from kvtransfer.base import BlockRef, Offer, Receiver
from tandem.clock import Clock, Deadline
from tandem.errors import FrameError, TandemError, TicketRefused, TransferError
from tandem.first_token import decode_first_token
from tandem.lifecycle import TRANSFER_MOVES, BlockState, TransferState, advance
from tandem.types import BlockId, TokenId


@dataclass(frozen=True, slots=True)
class LandingPolicy:
    """How long a prefill worker may take. Backstops: a dead router, peer or deadline ends it sooner."""

    ticket_s: float = 15.0
    """From the ticket to its being shown."""
    handoff_s: float = 900.0
    """From the ticket to the commit, most of which a prompt may spend in the prefill worker's line.

    Reached only where that worker forgets the prompt and goes on with others: of an idle one the
    router hears the silence, and releases."""


class LandingOwner(Protocol):
    """Who is told how a landing went. Exactly one of the first two, unless it was withdrawn."""

    def landed(self, arrival: Arrival, block_ids: tuple[BlockId, ...], first_token: TokenId) -> None:
        """Verified; the owner holds the (live) blocks now and must release them."""
        ...

    def landing_failed(self, arrival: Arrival, error: TandemError) -> None:
        """Nothing of it may be used; blocks are none of the owner's business."""
        ...

    def blocks_freed(self) -> None:
        """Blocks of a failed landing are free again."""
        ...


class Landing:
    """One hand-off's `HandoffListener`."""

    def __init__(
        self, arrival: Arrival, block_ids: tuple[BlockId, ...], pool: BlockPool, clock: Clock, owner: LandingOwner
    ) -> None:
        """`block_ids` are RESERVED, and this landing's until it ends."""
        self._arrival = arrival
        self._block_ids = block_ids
        self._pool = pool
        self._clock = clock
        self._owner = owner
        self._state = TransferState.OFFERED
        self._shown_s = 0.0

    @property
    def state(self) -> TransferState:
        """Where it is."""
        return self._state

    @property
    def receiving_s(self) -> float:
        """How long ago the ticket was shown."""
        return self._clock.now_s() - self._shown_s

    def on_receiving(self) -> None:
        """Moves the blocks under the writer. Raises TicketRefused if the offer is over or taken."""
        if self._state is not TransferState.OFFERED:
            raise TicketRefused(f"the offer is already {self._state}")
        self._state = advance(TRANSFER_MOVES, self._state, TransferState.RECEIVING)
        self._pool.start_receiving(self._block_ids)
        self._shown_s = self._clock.now_s()
        self._arrival.observer.transfer_started()

    def on_committed(self, first_token_payload: bytes) -> None:
        """Hands the verified blocks to the owner, or frees them if the payload is none of ours."""
        self._state = advance(TRANSFER_MOVES, self._state, TransferState.COMMITTED)
        self._pool.seal(self._block_ids)
        try:
            first_token = decode_first_token(first_token_payload)
        except FrameError as error:
            self._let_go()
            self._owner.landing_failed(self._arrival, error)
            return
        self._owner.landed(self._arrival, self._block_ids, first_token)

    def on_failed(self, error: TransferError) -> None:
        """Frees blocks that nobody could write into, quarantines the others."""
        if self._state is TransferState.OFFERED:
            self._state = advance(TRANSFER_MOVES, self._state, TransferState.FAILED)
            self._let_go()
        elif self._state is TransferState.RECEIVING:
            self._state = advance(TRANSFER_MOVES, self._state, TransferState.QUARANTINED)
            self._pool.release(self._block_ids)
        self._owner.landing_failed(self._arrival, error)

    def on_writer_stopped(self) -> None:
        """Frees quarantined blocks; of others there is nothing left to free."""
        if self._state is TransferState.QUARANTINED:
            self._state = advance(TRANSFER_MOVES, self._state, TransferState.FAILED)
            self._pool.writer_stopped(self._block_ids)
            self._owner.blocks_freed()

    def _let_go(self) -> None:
        self._pool.release(self._block_ids)
        self._owner.blocks_freed()


@dataclass(frozen=True, slots=True)
class _Entry:
    landing: Landing
    transfer_id: str
    commit_by: Deadline


class LandingStrip:
    """The landings of one pool that may still make a sequence, by arrival."""

    def __init__(
        self, pool: BlockPool, receiver: Receiver, clock: Clock, owner: LandingOwner, policy: LandingPolicy
    ) -> None:
        self._pool = pool
        self._receiver = receiver
        self._clock = clock
        self._owner = owner
        self._policy = policy
        self._entries: dict[Arrival, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def offer(self, arrival: Arrival) -> Offer:
        """Reserves blocks for the arrival's tokens and mints a ticket for them.

        Raises PoolExhausted if there are not enough, or what the receiver raises; then nothing was changed.
        """
        num_blocks = -(-len(arrival.spec.token_ids) // self._pool.block_size)
        block_ids = self._pool.allocate(num_blocks, BlockState.RESERVED)
        landing = Landing(arrival, block_ids, self._pool, self._clock, self)
        refs = tuple(BlockRef(block_id, self._pool.generation(block_id)) for block_id in block_ids)
        try:
            offer = self._receiver.offer(refs, landing, self._policy.ticket_s)
        except TandemError:
            self._pool.release(block_ids)
            raise
        commit_by = Deadline.after(self._clock, self._policy.handoff_s)
        self._entries[arrival] = _Entry(landing, offer.transfer_id, commit_by)
        return offer

    def withdraw(self, arrival: Arrival) -> None:
        """The request is gone: fails the hand-off without a word to the owner. Idempotent."""
        entry = self._entries.pop(arrival, None)
        if entry is not None:
            self._receiver.withdraw(entry.transfer_id)

    def expire(self) -> None:
        """Fails hand-offs whose time has run out: tickets never shown, writers that do not commit."""
        self._receiver.reap()
        for arrival, entry in list(self._entries.items()):
            if entry.commit_by.passed:
                self.withdraw(arrival)
                late_s = self._policy.handoff_s
                self._owner.landing_failed(arrival, TransferError(f"no commit within {late_s:g} s"))

    def landed(self, arrival: Arrival, block_ids: tuple[BlockId, ...], first_token: TokenId) -> None:
        """Passes verified blocks on, or frees them if the request has gone meanwhile."""
        entry = self._entries.pop(arrival, None)
        if entry is None:
            self._pool.release(block_ids)
            self._owner.blocks_freed()
        else:
            arrival.observer.transferred(0, entry.landing.receiving_s, None)
            self._owner.landed(arrival, block_ids, first_token)

    def landing_failed(self, arrival: Arrival, error: TandemError) -> None:
        """Passes a failure on, unless the request has gone meanwhile."""
        if self._entries.pop(arrival, None) is not None:
            self._owner.landing_failed(arrival, error)

    def blocks_freed(self) -> None:
        """Passes it on."""
        self._owner.blocks_freed()
