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

from kvtransfer.base import Fingerprints, PoolMemory
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
        if blocks.device.type != "cpu":
            raise ConfigError("transport", f"no transport reaches rows on {blocks.device}; give those of its ring")
        expected = fingerprints.layout.block_bytes
        if blocks.dtype != torch.uint8 or blocks.ndim != 2 or blocks.shape[1] != expected:
            raise InternalError(f"pool is {blocks.dtype} {tuple(blocks.shape)}, not uint8 [N, {expected}]")
        if not blocks.is_contiguous():
            raise InternalError("pool's blocks are not contiguous")
        self.incarnation: Final = memory.incarnation
        self.fingerprints = fingerprints
        self.shared_fd: Final = memory.shared_fd
        """memfd that holds `rows`, if they lie in shared memory; owned by the pool's owner."""
        self.device: Final = memory.device
        """The pool itself where that lies on a GPU; a step that has returned has written its KV there."""
        self._staging = memory.staging
        self.is_staged: Final = self._staging is not None
        """Whether blocks pass through `rows`, and do not lie there."""
        self.num_blocks: Final = len(blocks) if self._staging is None else self._staging.num_blocks
        self.block_bytes: Final[int] = expected
        self.rows: Final = Rows(blocks.numpy())
        """What transports of host memory reach."""
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

    async def checksums(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Returns xxh3-64 of each row, as the row lies in memory now."""
        return await self.start(lambda: self.rows.checksums(rows), len(rows) * self.block_bytes)

    async def stage(self, blocks: Sequence[BlockId], rows: Sequence[int]) -> None:
        """Brings blocks into `rows`, where they are not there already. Raises TransferError; see `base.Staging`."""
        if self._staging is not None:
            await self._staging.copy_out(blocks, self.rows, rows)

    async def settle(self, rows: Sequence[int], blocks: Sequence[BlockId]) -> None:
        """Brings what lies in `rows` into blocks, where it is not there already. As `stage`."""
        if self._staging is not None:
            await self._staging.copy_in(self.rows, rows, blocks)

    async def copy_to(self, peer: Rows, blocks: Sequence[BlockId], rows: Sequence[int]) -> tuple[int, ...]:
        """Copies block `blocks[i]` into row `rows[i]` of `peer`. Returns the checksums. Raises TransferError."""
        num_bytes = len(blocks) * self.block_bytes
        if self._staging is None:
            return await self.start(lambda: self.rows.copy_to(peer, blocks, rows), num_bytes)
        await self._staging.copy_out(blocks, peer, rows)
        return await self.start(lambda: peer.checksums(rows), num_bytes)

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
        """Populates the memory of blocks that a hand-off will write soon, if they lie in `rows`. Never waits."""
        if not self.is_staged:
            self.populate(self.rows, block_ids)

    def populate(self, memory: Rows, ids: RowIds) -> None:
        """Calls `Rows.populate` for untouched rows, on another thread than `start` uses. Never waits."""
        untouched = memory.untouched(ids)
        if not len(untouched):
            return
        if self._populating is None:
            self._populating = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-populate")
        self._populating.submit(memory.populate, untouched)

    def close(self) -> None:
        """Waits for the thread (pieces are small) and gives the memory back. Idempotent."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        if self._populating is not None:
            self._populating.shutdown(wait=False, cancel_futures=True)  # it ends once its memory is closed
            self._populating = None
        self.rows.close()

    def _divide(self, num_rows: int) -> None:
        """Cuts the rows of a staged pool into their parts."""
        if num_rows < MIN_ROWS:
            raise InternalError(f"a ring of {num_rows} rows; {MIN_ROWS} are the least")
        lent, arriving = num_rows // 2, num_rows * 3 // 4
        size = max(1, lent // MAX_SLICES)
        self._slices = [range(first, first + size) for first in range(0, lent - size + 1, size)][:MAX_SLICES]
        self.arriving, self.leaving = Ring(range(lent, arriving)), Ring(range(arriving, num_rows))
