"""This side's pool as transfers use it: rows as bytes, checksums, one thread for heavy work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from kvtransfer.base import Fingerprints, PoolMemory
from kvtransfer.handshake import Hello, fingerprint_fields
from tandem.errors import ConfigError, InternalError
from tandem.types import BlockId, Incarnation

INLINE_BYTES = 256 * 1024
"""Up to here a copy or hash costs the loop less (about 25 µs) than the trip to a thread."""

T = TypeVar("T")
Rows = npt.NDArray[np.uint8]


class LocalPool:
    """Borrows `memory` until `close`; never frees or resizes it."""

    def __init__(self, memory: PoolMemory, fingerprints: Fingerprints) -> None:
        """Raises ConfigError if the pool is not in host memory, InternalError if misshapen."""
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
        self.num_blocks: int = blocks.shape[0]
        self.block_bytes = expected
        self.rows: Rows = blocks.numpy()  # [N, block_bytes]
        self._bytes = self.rows.reshape(-1).data  # [N * block_bytes]
        self._thread: ThreadPoolExecutor | None = None

    def hello(self, transport: str) -> Hello:
        """What this side says of itself on a connection that moves payload by `transport`."""
        return Hello(self.incarnation, transport, self.num_blocks, fingerprint_fields(self.fingerprints))

    def span(self, first: BlockId, num_blocks: int = 1) -> memoryview:
        """Bytes of `num_blocks` neighbouring blocks, writable."""
        return self._bytes[first * self.block_bytes : (first + num_blocks) * self.block_bytes]

    def spans(self, block_ids: Iterable[BlockId]) -> list[memoryview]:
        """The blocks' bytes in order, runs of neighbours as one span."""
        runs: list[tuple[BlockId, int]] = []
        for block_id in block_ids:
            if runs and block_id == runs[-1][0] + runs[-1][1]:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((block_id, 1))
        return [self.span(first, n) for first, n in runs]

    def checksums(self, block_ids: Iterable[BlockId]) -> tuple[int, ...]:
        """xxh3-64 of each block as it lies in memory now."""
        return tuple(xxhash.xxh3_64_intdigest(self.span(block_id)) for block_id in block_ids)

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

    def close(self) -> None:
        """Waits for the thread (pieces are small) and lets go of the memory. Idempotent."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self._bytes.release()
        self.rows = np.empty((0, self.block_bytes), np.uint8)
