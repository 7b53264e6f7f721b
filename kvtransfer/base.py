"""The written contract of the KV hand-off: who calls what, how often, who frees the blocks.

Life of one hand-off, in order:

 1. decode worker   `Receiver.offer(blocks, first_block=…)` after reserving, in its pool, the blocks that it lacks;
                    the returned ticket and endpoint travel through the router as opaque bytes.
 2. prefill worker  `Sender.open(ticket, endpoint)` once; then, from `Handoff.first_block` on,
                    `Handoff.push(...)` once per chunk with blocks that no longer change, then
                    `Handoff.commit(...)` or `Handoff.abort()` once. `abort` after `commit` is a no-op, and the reverse.
 3. receiver        checks ticket, generations, sequence numbers, checksums; brings blocks into the pool itself;
                    calls its owner's `HandoffListener`, exactly one terminal call per offer.

A *position* is a place in the sequence's list of blocks, on both sides: the prompt's block 0 is position 0, whether it
travels or not. An offer covers the positions `first_block, first_block+1, …`, one per offered block; those before it
the decode worker holds already. It may be empty: then only COMMIT travels.

Who frees what: the *owner of each pool* frees its own blocks and nobody else. The sender
borrows source blocks from `push` until the awaited call returns. The receiver borrows target
blocks from the first accepted WRITE until `on_committed` or `on_writer_stopped`; a copy from staging rows into the
pool counts as writing, so neither call comes while one is under way.

How payload moves is a transport's business (`kvtransfer.transport`).

All methods run on one asyncio loop per process; heavy copies and hashes leave it for a thread.
Nothing here knows models, sequences or requests; `first_token_payload` is opaque.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, overload

import numpy as np
import numpy.typing as npt
import torch

from kvtransfer.rows import Rows
from tandem.errors import TransferError
from tandem.kv_layout import KvLayout
from tandem.types import BlockId, Incarnation, KvRoute


class SenderGaveUp(TransferError):
    """The sender ended the hand-off without a commit. Its request has ended there, or the failure is counted there."""


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """What both sides must share before a byte moves."""

    model: str
    layout: KvLayout


@dataclass(frozen=True, slots=True)
class BlockRef:
    """A block of the receiving pool in a given allocation."""

    block_id: BlockId
    generation: int


class BlockRefs(Sequence[BlockRef]):
    """Many of them as two arrays; equal to any sequence of the same."""

    __slots__ = ("block_ids", "generations")

    def __init__(self, block_ids: npt.NDArray[np.uint32], generations: npt.NDArray[np.uint64]) -> None:
        """`[n]` each."""
        self.block_ids = block_ids
        self.generations = generations

    @classmethod
    def of(cls, refs: Sequence[BlockRef]) -> BlockRefs:
        """Returns `refs` as arrays."""
        if isinstance(refs, BlockRefs):
            return refs
        ids, generations = [ref.block_id for ref in refs], [ref.generation for ref in refs]
        return cls(np.array(ids, np.int64).astype(np.uint32), np.array(generations, np.uint64))

    def __len__(self) -> int:
        return len(self.block_ids)

    @overload
    def __getitem__(self, at: int) -> BlockRef: ...

    @overload
    def __getitem__(self, at: slice) -> BlockRefs: ...

    def __getitem__(self, at: int | slice) -> BlockRef | BlockRefs:
        if isinstance(at, slice):
            return BlockRefs(self.block_ids[at], self.generations[at])
        return BlockRef(BlockId(int(self.block_ids[at])), int(self.generations[at]))

    def __iter__(self) -> Iterator[BlockRef]:
        columns = zip(self.block_ids.tolist(), self.generations.tolist(), strict=True)
        return (BlockRef(BlockId(block_id), generation) for block_id, generation in columns)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, BlockRefs):
            return np.array_equal(self.block_ids, other.block_ids) and np.array_equal(
                self.generations, other.generations
            )
        return tuple(self) == other

    def __hash__(self) -> int:
        return hash(tuple(self))


@dataclass(frozen=True, slots=True)
class Offer:
    """What the router carries from decode to prefill worker, unread."""

    transfer_id: str
    ticket: bytes
    endpoint: bytes


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What a committed hand-off took, as its sender measured."""

    transport: str
    num_blocks: int
    """Blocks that travelled."""
    num_bytes: int
    seconds: float
    """Spent in `push` and `commit`: staging on both sides included, until the blocks are in the receiving pool."""
    passed_over: str = ""
    """See `SendingLane.passed_over`."""
    num_spans: int = 0
    """See `ring.Loan.num_spans`."""

    @property
    def route(self) -> KvRoute:
        """How the blocks travelled."""
        return KvRoute(self.transport, self.passed_over)


class HandoffListener(Protocol):
    """The decode worker's side of one offer. Either `on_committed` or `on_writer_stopped` ends it, once.

    Whatever else a call raises is a bug, is logged, and ends this offer alone.
    """

    def on_receiving(self) -> None:
        """The ticket was shown for the first time, and no byte has come. Raises TransferError to refuse it."""

    def on_committed(self, first_token_payload: bytes) -> None:
        """Every block was verified and is in the pool, and nobody can write into these blocks.

        If this call raises, it has taken over nothing: the sender hears a failure, and the next two calls follow.
        """

    def on_failed(self, error: TransferError) -> None:
        """No block of the offer may be decoded. Comes at most once; blocks must wait for `on_writer_stopped`."""

    def on_writer_stopped(self) -> None:
        """Nobody can write into the blocks of a failed offer from now on. Follows `on_failed` at once if nobody ever
        could.
        """


class Receiver(Protocol):
    """Owns a pool's listening endpoint and the table of its offers."""

    @property
    def num_live(self) -> int:
        """Offers that have not ended."""

    async def start(self) -> None:
        """Listens. Raises ConfigError if nothing can listen there."""

    def offer(
        self, blocks: Sequence[BlockRef], listener: HandoffListener, expires_in_s: float, first_block: int = 0
    ) -> Offer:
        """Mints a ticket for exactly these blocks, in this order, at positions `first_block, …`. Never awaits.

        `blocks` may be empty if `first_block` is not 0. Raises InternalError if they are not the owner's to offer.
        """

    def withdraw(self, transfer_id: str) -> None:
        """The request is gone: fails the offer. Idempotent; unknown ids are no-ops."""

    def reap(self) -> None:
        """Fails what has expired. Called every tick whether or not new work arrives."""

    async def stop(self) -> None:
        """Fails every offer, closes every connection and the endpoint."""


class Handoff(Protocol):
    """The sender's side of one offer. Calls may take as long as anything moves; a peer that stands still is lost."""

    @property
    def first_block(self) -> int:
        """The first position that may be pushed: those before it the receiver holds already."""

    async def push(self, first: int, source_blocks: tuple[BlockId, ...]) -> None:
        """Sends finished blocks of the source pool to positions `first, first+1, …`, each once, in any order.

        Returns when the source blocks may be reused. Raises TransferError.
        """

    async def commit(self, first_token_payload: bytes) -> TransferReport:
        """Returns once the receiver has verified everything and has it in its pool. Raises TransferError."""

    async def abort(self) -> None:
        """Gives up; returns once this side can no longer write. Never raises."""


class Sender(Protocol):
    """Keeps a connection per receiving pool and multiplexes hand-offs over that connection."""

    async def open(self, ticket: bytes, endpoint: bytes, timeout_s: float) -> Handoff:
        """Connects and shakes hands if need be, in `timeout_s` at most; shows the ticket. Raises TransferError."""

    async def stop(self) -> None:
        """Aborts every hand-off and closes every connection."""


class Staging(Protocol):
    """Copies between a pool and rows of host memory, `[R, block_bytes]`. Even a cancelled call ends with its copy.

    Keeps no reference to `Rows.array`, not even in the traceback of an error: the memory may be unmapped next.
    """

    num_blocks: int
    """N of the pool."""

    async def copy_out(self, block_ids: Sequence[BlockId], into: Rows, rows: Sequence[int]) -> None:
        """Block `block_ids[i]` → row `rows[i]`. The blocks must not change meanwhile. Raises TransferError."""

    async def copy_in(self, source: Rows, rows: Sequence[int], block_ids: Sequence[BlockId]) -> None:
        """Row `rows[i]` → block `block_ids[i]`, which nobody may read or write meanwhile. Raises TransferError."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The pool itself where it lies on a GPU, for transports that move bytes between GPUs. Owned by the pool."""

    blocks: torch.Tensor
    """`[N, block_bytes]` uint8 on its device, contiguous."""
    shared_fd: int | None
    """Descriptor of the CUDA allocation that begins with block 0, for peers on this host; None = it has none."""
    allocation_bytes: int
    """Size of that allocation: whole granules."""


@dataclass(frozen=True, slots=True)
class PartMemory:
    """One rank's part of a pool that ranks divide, mapped in this process."""

    blocks: torch.Tensor
    """`[N, part_bytes]` uint8 in host memory."""
    shared_fd: int | None
    """See `PoolMemory.shared_fd`."""


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """A pool's bytes as transfers see them, and what to share them by."""

    blocks: torch.Tensor
    """`[R, block_bytes]` uint8 in host memory: the pool itself, or with `staging` rows that blocks pass through. With
    `followers` rank 0's part, `[N, part_bytes]`.
    """
    shared_fd: int | None
    """memfd that holds the rows, if they lie in shared memory; owned by the pool."""
    incarnation: Incarnation
    staging: Staging | None = None
    """How blocks of a pool elsewhere come into rows, and the reverse; None = row `i` is block `i`."""
    device: DeviceMemory | None = None
    """Memory of a GPU; None = the pool lies in host memory, or ranks divide the pool."""
    followers: tuple[PartMemory, ...] = ()
    """Parts of ranks 1, 2, … of a pool in host memory that ranks divide (`KvLayout.part`). Rows of a staged pool hold
    whole blocks: its `staging` joins the parts.
    """
