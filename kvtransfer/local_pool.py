"""This side's pool as transfers use it: blocks as bytes, checksums, one thread for heavy work.

_HostPool     the blocks lie in host memory, as rows
_StagedPool   they lie elsewhere, and pass through the rows of a ring where a transport reaches nothing else
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch

from kvtransfer.base import DeviceMemory, Fingerprints, PoolMemory, Staging
from kvtransfer.host_ring import HostRing
from kvtransfer.host_rows import HostRows, RowIds
from kvtransfer.row_copy import Rows
from tandem.errors import ConfigError, InternalError
from tandem.types import BlockId, Incarnation

INLINE_BYTES = 256 * 1024
"""Up to here a copy or hash costs the loop less (about 25 µs) than the trip to a thread."""

T = TypeVar("T")


class LocalPool(Protocol):
    """What lanes and sessions know of a pool."""

    incarnation: Incarnation
    fingerprints: Fingerprints
    num_blocks: int
    block_bytes: int
    shared_fd: int | None
    """memfd that holds the pool, or the ring, if they lie in shared memory; owned by the pool."""
    device: DeviceMemory | None
    """The pool itself where that lies on a GPU; a step that has returned has written its KV there."""
    ring: HostRing | None
    """Rows that blocks pass through; None = the blocks lie in host memory themselves, as `rows`."""

    @property
    def rows(self) -> Rows:
        """`[N, block_bytes]` uint8: row `i` is block `i`. As all that reads or writes it: InternalError with a ring."""

    def spans(self, block_ids: Iterable[BlockId]) -> list[memoryview]:
        """The blocks' bytes in order, writable, runs of neighbours as one span."""

    def checksums(self, block_ids: Iterable[BlockId]) -> tuple[int, ...]:
        """xxh3-64 of each block as it lies in memory now."""

    async def copy_out(self, block_ids: Sequence[BlockId], into: HostRows, rows: Sequence[int]) -> None:
        """See `base.Staging`; InternalError without a ring."""

    async def copy_in(self, source: HostRows, rows: Sequence[int], block_ids: Sequence[BlockId]) -> None:
        """See `base.Staging`; InternalError without a ring."""

    def start(self, work: Callable[[], T], num_bytes: int) -> asyncio.Future[T]:
        """Runs `work`, which touches `num_bytes`, here if small, else on this pool's thread.

        The future is not cancelled with its awaiter's task if awaited through `asyncio.wait`.
        """

    def make_ready(self, block_ids: RowIds) -> None:
        """A hand-off will write these blocks soon: populates their memory, if it is of the host. Never waits."""

    def populate(self, memory: HostRows, rows: RowIds) -> None:
        """Calls `HostRows.populate` for untouched rows, on another thread than `start` uses. Never waits."""

    def close(self) -> None:
        """Waits for the thread (pieces are small) and releases the memory. Idempotent."""


class _Pool:
    """What both forms have in common. Borrows `memory` until `close`; never frees or resizes it."""

    def __init__(self, memory: PoolMemory, fingerprints: Fingerprints, num_blocks: int) -> None:
        blocks = memory.blocks
        if blocks.device.type != "cpu":
            raise ConfigError("transport", f"no transport reaches rows on {blocks.device}; give those of its ring")
        expected = fingerprints.layout.block_bytes
        if blocks.dtype != torch.uint8 or blocks.ndim != 2 or blocks.shape[1] != expected:
            raise InternalError(f"pool is {blocks.dtype} {tuple(blocks.shape)}, not uint8 [N, {expected}]")
        if not blocks.is_contiguous():
            raise InternalError("pool's blocks are not contiguous")
        self.incarnation: Incarnation = memory.incarnation
        self.fingerprints = fingerprints
        self.shared_fd = memory.shared_fd
        self.device = memory.device
        self.num_blocks: int = num_blocks
        self.block_bytes = expected
        self._thread: ThreadPoolExecutor | None = None
        self._populating: ThreadPoolExecutor | None = None

    def start(self, work: Callable[[], T], num_bytes: int) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        if num_bytes <= INLINE_BYTES:
            done: asyncio.Future[T] = loop.create_future()
            done.set_result(work())
            return done
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-copy")
        return loop.run_in_executor(self._thread, work)

    def make_ready(self, block_ids: RowIds) -> None:
        """Nothing to do for blocks elsewhere."""

    def populate(self, memory: HostRows, rows: RowIds) -> None:
        untouched = memory.untouched(rows)
        if not len(untouched):
            return
        if self._populating is None:
            self._populating = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-populate")
        self._populating.submit(memory.populate, untouched)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        if self._populating is not None:
            self._populating.shutdown(wait=False, cancel_futures=True)  # it ends once its memory is closed
            self._populating = None


class _HostPool(_Pool):
    def __init__(self, memory: PoolMemory, fingerprints: Fingerprints) -> None:
        super().__init__(memory, fingerprints, len(memory.blocks))
        self.ring: HostRing | None = None
        self._host = HostRows(memory.blocks.numpy())

    @property
    def rows(self) -> Rows:
        return self._host.rows

    def spans(self, block_ids: Iterable[BlockId]) -> list[memoryview]:
        return self._host.spans(block_ids)

    def checksums(self, block_ids: Iterable[BlockId]) -> tuple[int, ...]:
        return self._host.checksums(block_ids)

    def make_ready(self, block_ids: RowIds) -> None:
        self.populate(self._host, block_ids)

    async def copy_out(self, block_ids: Sequence[BlockId], into: HostRows, rows: Sequence[int]) -> None:
        raise InternalError("the pool lies in host memory")

    async def copy_in(self, source: HostRows, rows: Sequence[int], block_ids: Sequence[BlockId]) -> None:
        raise InternalError("the pool lies in host memory")

    def close(self) -> None:
        super().close()
        self._host.close()


class _StagedPool(_Pool):
    """Borrows `staging` too."""

    def __init__(self, memory: PoolMemory, fingerprints: Fingerprints, staging: Staging) -> None:
        super().__init__(memory, fingerprints, staging.num_blocks)
        self._rows = HostRing(memory.blocks.numpy())
        self.ring: HostRing | None = self._rows
        self._staging = staging

    @property
    def rows(self) -> Rows:
        raise InternalError("the pool's blocks do not lie in host memory")

    def spans(self, block_ids: Iterable[BlockId]) -> list[memoryview]:
        raise InternalError("the pool's blocks do not lie in host memory")

    def checksums(self, block_ids: Iterable[BlockId]) -> tuple[int, ...]:
        raise InternalError("the pool's blocks do not lie in host memory")

    async def copy_out(self, block_ids: Sequence[BlockId], into: HostRows, rows: Sequence[int]) -> None:
        await self._staging.copy_out(block_ids, into, rows)

    async def copy_in(self, source: HostRows, rows: Sequence[int], block_ids: Sequence[BlockId]) -> None:
        await self._staging.copy_in(source, rows, block_ids)

    def close(self) -> None:
        super().close()
        self._rows.close()


def open_pool(memory: PoolMemory, fingerprints: Fingerprints) -> LocalPool:
    """The form that fits `memory`.

    Raises ConfigError if the rows are not in host memory, InternalError if they are misshapen.
    """
    if memory.staging is None:
        return _HostPool(memory, fingerprints)
    return _StagedPool(memory, fingerprints, memory.staging)
