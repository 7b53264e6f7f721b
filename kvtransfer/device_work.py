"""What transports do with a pool on a GPU: one thread and one stream per lane, beside the engine's.

A step that has returned has written its KV, so nothing here waits for the engine's streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from kernels.digest import as_unsigned, digest_blocks
from kvtransfer.lane_thread import LaneThread
from tandem.errors import TransferError
from tandem.types import BlockId

ANSWERS_WITHIN_S = 10.0
"""Copies and digests of one WRITE take milliseconds; a device that takes longer hangs."""

_FIRST = -1
"""The stream's priority: a digest of microseconds, for which a hand-off waits, goes before thread blocks of a step."""

T = TypeVar("T")


class DeviceWork(LaneThread):
    """Runs a lane's calls of the driver, which may wait for the device, off the loop and in order."""

    def __init__(self, blocks: torch.Tensor, last: Callable[[], None] = lambda: None) -> None:
        """Borrows the pool's `blocks`, `[N, block_bytes]` uint8."""
        super().__init__("kv-device", last)
        self._blocks = blocks
        self._stream = torch.cuda.Stream(blocks.device, priority=_FIRST) if blocks.is_cuda else None  # type: ignore[no-untyped-call]

    async def run(self, work: Callable[[], T]) -> T:
        """Runs `work` on the thread and returns its result; a cancelled call leaves the work running.

        Raises TransferError for RuntimeError, which is what torch and the driver raise for any error of the
        device. Work without an answer is left to run, too: the TransferError's cause is then a TimeoutError.
        """
        started = self.start(work)
        try:
            async with asyncio.timeout(ANSWERS_WITHIN_S):
                return await asyncio.shield(started)
        except TimeoutError as error:
            raise TransferError(f"the device did not answer within {ANSWERS_WITHIN_S:g} s") from error
        except RuntimeError as error:
            raise TransferError(f"the device failed: {error}") from error

    async def checksums(self, block_ids: Sequence[BlockId]) -> tuple[int, ...]:
        """Returns `digests` of the blocks. Raises as `run`."""
        return await self.run(lambda: self.digests(block_ids))

    def spare_block(self) -> torch.Tensor:
        """`[block_bytes]` uint8, of the lane's own stream: no kernel of a queued step still uses that memory."""
        with torch.cuda.stream(self._stream):
            return torch.empty_like(self._blocks[0])

    def digests(self, block_ids: Sequence[BlockId]) -> tuple[int, ...]:
        """`mix64` of each block as it lies on the device now. On the thread; raises RuntimeError."""
        with torch.cuda.stream(self._stream):  # None, as for a pool in host memory: nothing changes
            # Pinned, the ids are read by the device while the host goes on; the allocator keeps them as long.
            ids = torch.tensor(block_ids, dtype=torch.int64, pin_memory=self._stream is not None)
            return as_unsigned(digest_blocks(self._blocks, ids.to(self._blocks.device, non_blocking=True)))

    async def ended(self) -> bool:
        """See `LaneThread`; then gives the blocks back."""
        ended = await super().ended()
        if ended:
            self._blocks = torch.empty(0, 0, dtype=torch.uint8)
        return ended
