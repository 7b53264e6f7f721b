"""A pool's copy in host memory, row for row: how KV on a GPU travels while transports reach host memory only.

    prefill worker   pool ─ copy_out ─▶ mirror ═ transport ═▶ mirror ─ copy_in ─▶ pool   decode worker

Row i of the mirror is block i, so tickets, checksums and frames need not know of it. A step
that has returned has written its KV, and a copy that has returned has landed, so neither waits
for the other on the device: copies run beside steps, on a thread and a stream of their own.

Costs as much host memory as the pool takes on its device.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise

import torch

from engine.thread_work import to_the_end
from tandem.errors import TransferError
from tandem.types import BlockId


class PoolMirror:
    """Implements `kvtransfer.base.Staging`. All calls on the control loop; `close` joins the thread."""

    def __init__(self, pool: torch.Tensor, mirror: torch.Tensor) -> None:
        """Borrows `pool` on its device and `mirror` in host memory, each `[N, block_bytes]` uint8."""
        self._pool = pool
        self._mirror = mirror
        self._stream = torch.cuda.Stream(pool.device) if pool.is_cuda else None  # type: ignore[no-untyped-call]
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tandem-mirror")

    async def copy_out(self, block_ids: Sequence[BlockId]) -> None:
        """Copies blocks from the pool; their content must not change meanwhile.

        Raises TransferError. Even a cancelled call returns only after its copy has ended.
        """
        await self._copy(self._pool, self._mirror, block_ids)

    async def copy_in(self, block_ids: Sequence[BlockId]) -> None:
        """Copies blocks into the pool; nobody may read or write them meanwhile. Otherwise as `copy_out`."""
        await self._copy(self._mirror, self._pool, block_ids)

    def close(self) -> None:
        """Ends copies under way and lets go of both. Idempotent."""
        self._thread.shutdown(wait=True)
        self._pool = self._mirror = torch.empty(0, 0, dtype=torch.uint8)

    async def _copy(self, source: torch.Tensor, target: torch.Tensor, block_ids: Sequence[BlockId]) -> None:
        loop = asyncio.get_running_loop()
        await to_the_end(loop.run_in_executor(self._thread, self._copy_runs, source, target, tuple(block_ids)))

    def _copy_runs(self, source: torch.Tensor, target: torch.Tensor, block_ids: tuple[BlockId, ...]) -> None:
        try:
            with self._on_stream():
                for rows in _runs(block_ids):
                    target[rows].copy_(source[rows], non_blocking=True)
        except RuntimeError as error:  # torch's word for whatever the device says
            raise TransferError(
                f"{len(block_ids)} blocks could not be copied between pool and host: {error}"
            ) from error

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Device work within it has ended when it ends."""
        if self._stream is None:
            yield
            return
        ended = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # sleeps instead of spinning on a core
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            ended.record(self._stream)
            ended.synchronize()


def _runs(block_ids: Sequence[BlockId]) -> Iterator[slice]:
    """Neighbouring rows as one slice each: few large copies instead of many small ones."""
    starts = [i for i, block_id in enumerate(block_ids) if i == 0 or block_id != block_ids[i - 1] + 1]
    for start, end in pairwise([*starts, len(block_ids)]):
        yield slice(block_ids[start], block_ids[start] + end - start)
