"""The host tier: rows of host memory that whole blocks move to, and back into other blocks later.

Owns the memory; a step moves the bytes (`engine.step.TierMove`). Who holds a row is `engine.host_moves`' to know.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import torch

from engine.kv_cache import HostMemory
from engine.step import Direction, TierMove
from shell.telemetry.logging import get_logger
from tandem.types import BlockId

_log = get_logger(__name__)

_MEASURED_BLOCKS = 16


class HostTier:
    """`num_rows` rows of `block_bytes` bytes; `close` ends the tier."""

    def __init__(self, num_rows: int, block_bytes: int, *, pinned_for: torch.device | None = None) -> None:
        """`pinned_for` a GPU: it copies them while the host goes on. Raises RuntimeError (torch) if memory runs out."""
        self._memory = HostMemory.allocate(num_rows * block_bytes, shared=False)
        if pinned_for is not None and not self._memory.pin(pinned_for):
            _log.warning("host cache not pinned: copies to and from it hold steps up", bytes=len(self._memory.bytes))
        self.num_rows: Final = num_rows
        """All rows, in use or not."""
        self.block_s = 0.0
        """Seconds that moving a block takes, once measured."""
        self._block_bytes = block_bytes

    def row(self, row: int) -> memoryview:
        """Returns the row's bytes, `[block_bytes]`, to be used while no step moves them; they outlive `close`."""
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
        out = [TierMove(BlockId(each), each, Direction.OUT) for each in range(num_blocks)]
        back = [TierMove(BlockId(each), each, Direction.IN) for each in range(num_blocks)]
        for _ in range(2):  # the first touches the pages
            began_s = time.monotonic()
            self.move([*out, *back], pool)
            if pool.device.type == "cuda":
                torch.cuda.synchronize(pool.device)
            self.block_s = (time.monotonic() - began_s) / (2 * num_blocks)

    def close(self) -> None:
        """Gives the memory back; no step that moves blocks may be running. Idempotent."""
        self._memory.close()
