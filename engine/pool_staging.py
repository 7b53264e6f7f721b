"""Copies between a pool and rows of host memory, where transports reach nothing else.

The control loop names what is to be copied; one thread drives the copies on a stream of its own, beside the engine's
steps. It orders nothing against those: a step that has returned has written its KV, and blocks that are copied
into are no step's yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from shell.thread_work import to_the_end
from tandem.errors import TransferError
from tandem.types import BlockId


class RowMemory(Protocol):
    """Memory that its owner may take back once no copy runs."""

    array: npt.NDArray[np.uint8]
    """`[R, block_bytes]`."""


class PoolStaging:
    """Implements `kvtransfer.base.Staging`. All calls on the control loop; `close` joins the thread."""

    def __init__(self, pool: torch.Tensor) -> None:
        """Borrows `pool` `[N, block_bytes]` uint8, on its device."""
        self.num_blocks = len(pool)
        """N."""
        self._pool = pool
        self._stream = torch.cuda.Stream(pool.device) if pool.is_cuda else None  # type: ignore[no-untyped-call]
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tandem-staging")

    async def copy_out(self, block_ids: Sequence[BlockId], into: RowMemory, rows: Sequence[int]) -> None:
        """Copies block `block_ids[i]` to row `rows[i]`; their content must not change meanwhile.

        Raises TransferError. Even a cancelled call returns only after its copy has ended.
        """
        await self._run(into, tuple(block_ids), tuple(rows), outward=True)

    async def copy_in(self, source: RowMemory, rows: Sequence[int], block_ids: Sequence[BlockId]) -> None:
        """Copies row `rows[i]` to block `block_ids[i]`, which nobody may read or write meanwhile. As `copy_out`."""
        await self._run(source, tuple(block_ids), tuple(rows), outward=False)

    def close(self) -> None:
        """Ends copies under way and gives the pool back. Idempotent."""
        self._thread.shutdown(wait=True)
        self._pool = torch.empty(0, 0, dtype=torch.uint8)

    async def _run(
        self, host: RowMemory, block_ids: tuple[BlockId, ...], rows: tuple[int, ...], *, outward: bool
    ) -> None:
        loop = asyncio.get_running_loop()
        await to_the_end(loop.run_in_executor(self._thread, self._copy, host, block_ids, rows, outward))

    def _copy(self, host: RowMemory, block_ids: tuple[BlockId, ...], rows: tuple[int, ...], outward: bool) -> None:
        """No variable holds the rows: an error's traceback would keep them, and with them a mapping, from closing."""
        try:
            with self._on_stream():
                for block, row, count in _runs(block_ids, rows):
                    if outward:
                        torch.from_numpy(host.array[row : row + count]).copy_(
                            self._pool[block : block + count], non_blocking=True
                        )
                    else:
                        self._pool[block : block + count].copy_(
                            torch.from_numpy(host.array[row : row + count]), non_blocking=True
                        )
        except RuntimeError as error:  # torch raises it for whatever the device reports
            raise TransferError(
                f"{len(block_ids)} blocks could not be copied between pool and host: {error}"
            ) from error

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Runs device work on the stream; that work has ended when the context ends."""
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


def _runs(block_ids: Sequence[BlockId], rows: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """`(block, row, count)` of neighbours on both sides: few large copies instead of many small ones."""
    first = 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or block_ids[i] != block_ids[i - 1] + 1 or rows[i] != rows[i - 1] + 1:
            yield block_ids[first], rows[first], i - first
            first = i
