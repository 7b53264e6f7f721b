"""The host tier: rows of host memory that whole blocks move to, and back into other blocks later.

Owns the rows and who holds them; a step moves the bytes (`engine.step.TierMove`). The control loop allocates
and frees rows; a row may be freed once the last launched step that names it has ended.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import torch

from engine.kv_cache import HostMemory
from engine.step import Direction, HostRow, TierMove
from shell.telemetry.logging import get_logger
from tandem.errors import InternalError, Overloaded
from tandem.types import BlockId

_log = get_logger(__name__)

_MEASURED_BLOCKS = 16


class HostTier:
    """`num_rows` rows of `block_bytes` bytes. `close` ends it."""

    def __init__(self, num_rows: int, block_bytes: int, *, pinned_for: torch.device | None = None) -> None:
        """`pinned_for` a GPU: it copies them while the host goes on. Raises RuntimeError (torch) if memory runs out."""
        self._memory = HostMemory.allocate(num_rows * block_bytes, shared=False)
        if pinned_for is not None and not self._memory.pin(pinned_for):
            _log.warning("host cache not pinned: copies to and from it hold steps up", bytes=len(self._memory.bytes))
        self.num_rows: Final = num_rows
        """All rows, free or not."""
        self.block_s = 0.0
        """What moving a block takes, in seconds, once it was measured."""
        self._block_bytes = block_bytes
        self._free = [HostRow(row) for row in range(num_rows - 1, -1, -1)]
        self._held: set[HostRow] = set()

    @property
    def num_free(self) -> int:
        """Rows that `allocate` can hand out now."""
        return len(self._free)

    def allocate(self, num_rows: int) -> tuple[HostRow, ...]:
        """Takes rows, which the caller frees. Raises Overloaded if there are not so many, and takes none then."""
        if num_rows > len(self._free):
            raise Overloaded(f"{num_rows} rows of the host tier wanted, {len(self._free)} free")
        rows = tuple(self._free.pop() for _ in range(num_rows))
        self._held.update(rows)
        return rows

    def free(self, rows: Sequence[HostRow]) -> None:
        """Gives rows back. Raises InternalError if one is not held, and frees none then."""
        if len(set(rows)) != len(rows) or not self._held.issuperset(rows):
            raise InternalError(f"free of rows {list(rows)}, which are not all held, or named twice")
        self._held.difference_update(rows)
        self._free.extend(reversed(rows))

    def row(self, row: HostRow) -> memoryview:
        """`[block_bytes]`, to be written and read while no step moves it; it outlives `close`."""
        begin = row * self._block_bytes
        return self._memory.bytes[begin : begin + self._block_bytes].numpy().data

    def move(self, moves: Sequence[TierMove], pool: torch.Tensor) -> None:
        """Queues copies between the rows and `pool` `[N, block_bytes]` uint8: first those out of it, then those in."""
        rows = self._memory.bytes.view(-1, self._block_bytes)
        for each in moves:
            if each.direction is Direction.OUT:
                rows[each.row].copy_(pool[each.block], non_blocking=True)
        for each in moves:
            if each.direction is Direction.IN:
                pool[each.block].copy_(rows[each.row], non_blocking=True)

    def measure(self, pool: torch.Tensor) -> None:
        """Sets `block_s` by moving blocks, whose content nobody counts on yet, out and in; on the engine's thread."""
        num_blocks = min(_MEASURED_BLOCKS, self.num_rows, len(pool))
        out = [TierMove(BlockId(each), HostRow(each), Direction.OUT) for each in range(num_blocks)]
        back = [TierMove(BlockId(each), HostRow(each), Direction.IN) for each in range(num_blocks)]
        for _ in range(2):  # the first touches the pages
            began_s = time.monotonic()
            self.move([*out, *back], pool)
            if pool.device.type == "cuda":
                torch.cuda.synchronize(pool.device)
            self.block_s = (time.monotonic() - began_s) / (2 * num_blocks)

    def close(self) -> None:
        """Gives the memory back; no step that moves blocks may be running. Idempotent."""
        self._memory.close()
