"""This side's pool as transfers use it: rows as bytes, checksums, one thread for heavy work.

_HostPool     the rows are the pool
_StagedPool   the rows stand for a pool elsewhere, block for block: copied out before they are read, in after
              they were written
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from kvtransfer.base import DeviceMemory, Fingerprints, PoolMemory, Staging
from tandem.errors import ConfigError, InternalError
from tandem.types import BlockId, Incarnation

INLINE_BYTES = 256 * 1024
"""Up to here a copy or hash costs the loop less (about 25 µs) than the trip to a thread."""

T = TypeVar("T")
Rows = npt.NDArray[np.uint8]


class LocalPool(Staging, Protocol):
    """What lanes and sessions know of a pool. Row `i` in host memory is block `i`, or stands for it.

    `copy_out` comes before rows are read, `copy_in` after they were written.
    """

    incarnation: Incarnation
    fingerprints: Fingerprints
    num_blocks: int
    block_bytes: int
    shared_fd: int | None
    """memfd that holds the rows, if they lie in shared memory; owned by the pool."""
    rows: Rows
    """`[N, block_bytes]` uint8."""
    device: DeviceMemory | None
    """The pool itself where that lies on a GPU; a step that has returned has written its KV there."""

    def spans(self, block_ids: Iterable[BlockId]) -> list[memoryview]:
        """The rows' bytes in order, writable, runs of neighbours as one span."""

    def checksums(self, block_ids: Iterable[BlockId]) -> tuple[int, ...]:
        """xxh3-64 of each row as it lies in memory now."""

    def start(self, work: Callable[[], T], num_bytes: int) -> asyncio.Future[T]:
        """Runs `work`, which touches `num_bytes`, here if small, else on this pool's thread.

        The future is not cancelled with its awaiter's task if awaited through `asyncio.wait`.
        """

    def close(self) -> None:
        """Waits for the thread (pieces are small) and releases the memory. Idempotent."""


class _HostPool:
    """Borrows `memory` until `close`; never frees or resizes it."""

    def __init__(self, memory: PoolMemory, fingerprints: Fingerprints) -> None:
        blocks = memory.blocks
        if blocks.device.type != "cpu":
            raise ConfigError("transport", f"no transport reaches blocks on {blocks.device}; give those of its mirror")
        expected = fingerprints.layout.block_bytes
        if blocks.dtype != torch.uint8 or blocks.ndim != 2 or blocks.shape[1] != expected:
            raise InternalError(f"pool is {blocks.dtype} {tuple(blocks.shape)}, not uint8 [N, {expected}]")
        if not blocks.is_contiguous():
            raise InternalError("pool's blocks are not contiguous")
        self.incarnation: Incarnation = memory.incarnation
        self.fingerprints = fingerprints
        self.shared_fd = memory.shared_fd
        self.device = memory.device
        self.num_blocks: int = blocks.shape[0]
        self.block_bytes = expected
        self.rows: Rows = blocks.numpy()  # [N, block_bytes]
        self._bytes = self.rows.reshape(-1).data  # [N * block_bytes]
        self._thread: ThreadPoolExecutor | None = None

    async def copy_out(self, block_ids: Sequence[BlockId]) -> None:
        """Nothing to copy."""

    async def copy_in(self, block_ids: Sequence[BlockId]) -> None:
        """Nothing to copy."""

    def spans(self, block_ids: Iterable[BlockId]) -> list[memoryview]:
        runs: list[tuple[BlockId, int]] = []
        for block_id in block_ids:
            if runs and block_id == runs[-1][0] + runs[-1][1]:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((block_id, 1))
        return [self._span(first, n) for first, n in runs]

    def checksums(self, block_ids: Iterable[BlockId]) -> tuple[int, ...]:
        return tuple(xxhash.xxh3_64_intdigest(self._span(block_id)) for block_id in block_ids)

    def start(self, work: Callable[[], T], num_bytes: int) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        if num_bytes <= INLINE_BYTES:
            done: asyncio.Future[T] = loop.create_future()
            done.set_result(work())
            return done
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-copy")
        return loop.run_in_executor(self._thread, work)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self._bytes.release()
        self.rows = np.empty((0, self.block_bytes), np.uint8)

    def _span(self, first: BlockId, num_blocks: int = 1) -> memoryview:
        return self._bytes[first * self.block_bytes : (first + num_blocks) * self.block_bytes]


class _StagedPool(_HostPool):
    """Borrows `staging` too."""

    def __init__(self, memory: PoolMemory, fingerprints: Fingerprints, staging: Staging) -> None:
        super().__init__(memory, fingerprints)
        self._staging = staging

    async def copy_out(self, block_ids: Sequence[BlockId]) -> None:
        await self._staging.copy_out(block_ids)

    async def copy_in(self, block_ids: Sequence[BlockId]) -> None:
        await self._staging.copy_in(block_ids)


def open_pool(memory: PoolMemory, fingerprints: Fingerprints) -> LocalPool:
    """The form that fits `memory`.

    Raises ConfigError if the rows are not in host memory, InternalError if they are misshapen.
    """
    if memory.staging is None:
        return _HostPool(memory, fingerprints)
    return _StagedPool(memory, fingerprints, memory.staging)
