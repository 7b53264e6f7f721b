"""This side's pool as transfers use it: blocks as rows of bytes, checksums, one thread for heavy work.

Where the blocks lie in host memory, block `i` is row `i`. Where they lie elsewhere, the pool is *staged*: blocks pass
through few rows, and only who was lent a row knows which block lies there:

    first half      cut into slices, each lent to one peer that writes there itself, as long as it is connected
    third quarter   `arriving`: received here, then copied into the pool
    last quarter    `leaving`: copied out of the pool, then sent

What arrives and what leaves never wait for each other: two workers that send to each other would else wait for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import torch

from kvtransfer.base import Fingerprints, PartMemory, PoolMemory
from kvtransfer.grain_rows import GrainRows
from kvtransfer.ring import Ring
from kvtransfer.rows import RowIds, Rows
from tandem.errors import ConfigError, InternalError
from tandem.types import BlockId

INLINE_BYTES = 256 * 1024
"""Up to here a copy or hash costs the loop less (about 25 µs) than the trip to a thread."""
MAX_SLICES = 16
"""Peers that write into the rows at a time: as many as a machine has workers on its GPUs, about."""
MIN_ROWS = 4
"""The least rows of a staged pool: one slice, another row beside, one that arrives and one that leaves."""

T = TypeVar("T")


class Pool:
    """Bytes of a pool; borrows `memory` until `close`, never frees or resizes that memory."""

    def __init__(self, memory: PoolMemory, fingerprints: Fingerprints) -> None:
        """Raises ConfigError if the rows are not in host memory, InternalError if they are misshapen or too few."""
        blocks = memory.blocks
        parts = (PartMemory(blocks, memory.shared_fd), *memory.followers)
        for part in parts:
            _check(part.blocks, (len(blocks), fingerprints.layout.part(len(parts)).block_bytes))
        if memory.followers and (memory.staging is not None or memory.device is not None):
            raise InternalError("a pool on a device has no parts in host memory")
        self.incarnation: Final = memory.incarnation
        self.fingerprints = fingerprints
        self.shared_fds: Final = tuple(part.shared_fd for part in parts if part.shared_fd is not None)
        """memfd of each of `parts`, if these lie in shared memory, else fewer; owned by the pool's owner."""
        self.device: Final = memory.device
        """The pool itself where that lies on a GPU; a step that has returned has written its KV there."""
        self._staging = memory.staging
        self.is_staged: Final = self._staging is not None
        """Whether blocks pass through `rows`, and do not lie there."""
        self.num_blocks: Final = len(blocks) if self._staging is None else self._staging.num_blocks
        self.block_bytes: Final[int] = fingerprints.layout.block_bytes
        self.parts: Final = tuple(Rows(part.blocks.numpy()) for part in parts)
        """Memory that transports of host memory reach, by rank."""
        self.rows: Final = self.parts[0]
        """The only one of `parts`, unless ranks divide the pool."""
        self.arriving, self.leaving = Ring(), Ring()
        self._slices: list[range] = []
        if self.is_staged:
            self._divide(len(blocks))
        self._thread: ThreadPoolExecutor | None = None
        self._populating: ThreadPoolExecutor | None = None

    def lend_slice(self) -> range | None:
        """Lends rows of a staged pool to one peer alone, until `return_slice`; None if all slices are lent."""
        return self._slices.pop() if self._slices else None

    def return_slice(self, rows: range) -> None:
        """Takes a slice back: its peer is proven unable to write there."""
        self._slices.append(rows)

    async def checksums(self, of: GrainRows, rows: Sequence[int]) -> tuple[int, ...]:
        """See `GrainRows.checksums`."""
        return await self.start(lambda: of.checksums(rows), len(rows) * self.block_bytes)

    async def stage(self, blocks: Sequence[BlockId], rows: Sequence[int]) -> None:
        """Brings blocks into `rows`, where they are not there already. Raises TransferError; see `base.Staging`."""
        if self._staging is not None:
            await self._staging.copy_out(blocks, self.rows, rows)

    async def settle(self, rows: Sequence[int], blocks: Sequence[BlockId]) -> None:
        """Brings what lies in `rows` into blocks, where it is not there already. As `stage`."""
        if self._staging is not None:
            await self._staging.copy_in(self.rows, rows, blocks)

    async def copy_out(self, peer: GrainRows, blocks: Sequence[BlockId], rows: Sequence[int]) -> tuple[int, ...]:
        """Copies blocks of a staged pool into a peer's rows of whole blocks. Returns the checksums.

        Raises TransferError.
        """
        if self._staging is None:
            raise InternalError("blocks of a pool in host memory are copied from there")
        await self._staging.copy_out(blocks, peer.parts[0], rows)
        return await self.checksums(peer, rows)

    def start(self, work: Callable[[], T], num_bytes: int) -> asyncio.Future[T]:
        """Runs `work`, which touches `num_bytes`, here if small, else on this pool's thread.

        The future is not cancelled with its awaiter's task if awaited through `asyncio.wait`.
        """
        loop = asyncio.get_running_loop()
        if num_bytes <= INLINE_BYTES:
            done: asyncio.Future[T] = loop.create_future()
            done.set_result(work())
            return done
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-copy")
        return loop.run_in_executor(self._thread, work)

    def make_ready(self, block_ids: RowIds) -> None:
        """Populates the memory of blocks that a hand-off will write soon, if they lie in `parts`. Never waits."""
        if not self.is_staged:
            self.populate(self.parts, block_ids)

    def populate(self, parts: Sequence[Rows], ids: RowIds) -> None:
        """Calls `Rows.populate` for untouched rows, on another thread than `start` uses. Never waits."""
        for part in parts:
            untouched = part.untouched(ids)
            if not len(untouched):
                continue
            if self._populating is None:
                self._populating = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-populate")
            self._populating.submit(part.populate, untouched)

    def close(self) -> None:
        """Waits for the thread (pieces are small) and gives the memory back. Idempotent."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        if self._populating is not None:
            self._populating.shutdown(wait=False, cancel_futures=True)  # it ends once its memory is closed
            self._populating = None
        for part in self.parts:
            part.close()

    def _divide(self, num_rows: int) -> None:
        """Cuts the rows of a staged pool into their parts."""
        if num_rows < MIN_ROWS:
            raise InternalError(f"a ring of {num_rows} rows; {MIN_ROWS} are the least")
        lent, arriving = num_rows // 2, num_rows * 3 // 4
        size = max(1, lent // MAX_SLICES)
        self._slices = [range(first, first + size) for first in range(0, lent - size + 1, size)][:MAX_SLICES]
        self.arriving, self.leaving = Ring(range(lent, arriving)), Ring(range(arriving, num_rows))


def _check(blocks: torch.Tensor, shape: tuple[int, int]) -> None:
    """Raises ConfigError, InternalError: see `Pool`."""
    if blocks.device.type != "cpu":
        raise ConfigError("transport", f"no transport reaches rows on {blocks.device}; give those of its ring")
    if blocks.dtype != torch.uint8 or blocks.shape != shape or not blocks.is_contiguous():
        raise InternalError(f"pool is {blocks.dtype} {tuple(blocks.shape)}, not contiguous uint8 {shape}")
