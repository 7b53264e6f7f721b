"""The written contract of the KV hand-off: who calls what, how often, who frees the blocks.

Life of one hand-off, in order:

 1. decode worker   `Receiver.offer(blocks)` after reserving blocks in its pool; the returned
                    ticket and endpoint travel through the router as opaque bytes.
 2. prefill worker  `Sender.open(ticket, endpoint)` once; then `Handoff.push(...)` once per chunk
                    with blocks that will not change any more, then `Handoff.commit(...)` or
                    `Handoff.abort()` once. `abort` after `commit` is a no-op, and the reverse.
 3. receiver        checks ticket, generations, sequence numbers, checksums; tells its owner
                    through `HandoffListener`, exactly one terminal call per offer.

Who frees what: the *owner of each pool* frees its own blocks and nobody else. The sender
borrows source blocks from `push` until the awaited call returns. The receiver borrows target
blocks from the first accepted WRITE until `on_committed` or `on_writer_stopped`.

All methods run on one asyncio loop per process; heavy copies and hashes leave it for a thread.
Nothing here knows models, sequences or requests; `first_token_payload` is opaque.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from tandem.errors import TransferError
from tandem.kv_layout import KvLayout
from tandem.types import BlockId, Incarnation


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """What both sides must share before a byte moves."""

    model: str
    layout: KvLayout


@dataclass(frozen=True, slots=True)
class BlockRef:
    """A block of the receiving pool as of one allocation."""

    block_id: BlockId
    generation: int


@dataclass(frozen=True, slots=True)
class Offer:
    """What the router carries from decode to prefill worker, unread."""

    transfer_id: str
    ticket: bytes
    endpoint: bytes


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What one committed hand-off took, as the sender measured it."""

    transport: str
    num_blocks: int
    num_bytes: int
    seconds: float


class HandoffListener(Protocol):
    """The decode worker's side of one offer. Exactly one of the last two calls ends it.

    `on_receiving` precedes the first byte and may refuse by raising TransferError.
    `on_committed` means every block was verified. `on_failed` comes at most once and means
    that nothing may be decoded; blocks must then wait for `on_writer_stopped`, which comes
    once nobody can write into them any more (at once if nobody ever could).
    """

    def on_receiving(self) -> None:
        """The ticket was shown for the first time; bytes may follow."""
        ...

    def on_committed(self, first_token_payload: bytes) -> None:
        """Verified whole. The writer has let go."""
        ...

    def on_failed(self, error: TransferError) -> None:
        """Nothing of it may be used."""
        ...

    def on_writer_stopped(self) -> None:
        """After `on_failed`: nobody can write into the blocks any more."""
        ...


class Receiver(Protocol):
    """Owns the listening endpoint of one pool and the table of offers."""

    @property
    def num_live(self) -> int:
        """Offers that have not ended."""
        ...

    async def start(self) -> None:
        """Listens. Raises ConfigError if it cannot."""
        ...

    def offer(self, blocks: tuple[BlockRef, ...], listener: HandoffListener, expires_in_s: float) -> Offer:
        """Mints a ticket for exactly these blocks, in this order. Never awaits."""
        ...

    def withdraw(self, transfer_id: str) -> None:
        """The request is gone: fails the offer. Idempotent; unknown ids are no-ops."""
        ...

    def reap(self) -> None:
        """Fails what has expired. Called every tick whether or not new work arrives."""
        ...

    async def stop(self) -> None:
        """Fails every offer, closes every connection and the endpoint."""
        ...


class Handoff(Protocol):
    """The sender's side of one offer."""

    async def push(self, first: int, source_blocks: tuple[BlockId, ...]) -> None:
        """Sends finished blocks of the source pool to positions `first, first+1, …` of the offer.

        Returns when the source blocks may be reused. Raises TransferError.
        """
        ...

    async def commit(self, first_token_payload: bytes) -> TransferReport:
        """Returns once the receiver has verified and attached everything. Raises TransferError."""
        ...

    async def abort(self) -> None:
        """Gives up; returns once this side can no longer write. Never raises."""
        ...


class Sender(Protocol):
    """Keeps one connection per receiving pool and multiplexes hand-offs over it."""

    async def open(self, ticket: bytes, endpoint: bytes, timeout_s: float) -> Handoff:
        """Connects if need be, shakes hands, shows the ticket. Raises TransferError."""
        ...

    async def stop(self) -> None:
        """Aborts every hand-off and closes every connection."""
        ...


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """A pool's bytes as transfers see them: `[N, block_bytes]` uint8, and what to share it by."""

    blocks: torch.Tensor
    """`[N, block_bytes]` uint8, row `i` is block `i`; a view, not a copy."""
    shared_fd: int | None
    """memfd that holds the pool, if it lies in shared memory; owned by the pool."""
    incarnation: Incarnation
