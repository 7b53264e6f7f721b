"""A pool that ranks divide, each part in a memory file of its own, and what a part holds by definition."""

from __future__ import annotations

import secrets
from contextlib import ExitStack

import torch

from kvtransfer.base import PartMemory, PoolMemory
from tandem.kv_layout import KvLayout
from tandem.types import Incarnation
from tests.transports import SharedPool

NUM_BLOCKS = 12


def blocks_of(layout: KvLayout, seed: int, num_blocks: int = NUM_BLOCKS) -> torch.Tensor:
    """`[N, block_bytes]`, the same in every process."""
    shape = (num_blocks, layout.block_bytes)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def part_of(blocks: torch.Tensor, num_heads: int, rank: int, num_ranks: int) -> torch.Tensor:
    """The heads of a rank, of whole blocks."""
    first, count = rank * num_heads // num_ranks, max(1, num_heads // num_ranks)
    heads = blocks.view(len(blocks), num_heads, -1)
    return heads[:, first : first + count].reshape(len(blocks), -1)


class PartedPool:
    """Zero, or what `fill` puts there."""

    def __init__(self, layout: KvLayout, num_ranks: int, num_blocks: int = NUM_BLOCKS) -> None:
        self._layout = layout
        self._undo = ExitStack()
        self._pools = [SharedPool(num_blocks, layout.part(num_ranks).block_bytes) for _ in range(num_ranks)]
        for pool in self._pools:
            self._undo.callback(pool.close)
            pool.blocks.zero_()
        followers = tuple(PartMemory(pool.blocks, pool.fd) for pool in self._pools[1:])
        first = self._pools[0]
        self.memory = PoolMemory(first.blocks, first.fd, Incarnation(secrets.token_hex(16)), followers=followers)

    @property
    def parts(self) -> list[torch.Tensor]:
        """`[N, part_bytes]` each, by rank."""
        return [pool.blocks for pool in self._pools]

    def fill(self, blocks: torch.Tensor) -> None:
        for part, due in zip(self.parts, self._due(blocks), strict=True):
            part.copy_(due)

    def holds(self, blocks: torch.Tensor, rows: list[int]) -> bool:
        """Whether `rows` are these blocks, in every part, and all other rows zero."""
        expected = torch.zeros(len(self.parts[0]), blocks.shape[1], dtype=torch.uint8)
        expected[rows] = blocks
        return all(map(torch.equal, self.parts, self._due(expected)))

    def _due(self, blocks: torch.Tensor) -> list[torch.Tensor]:
        num_ranks = len(self._pools)
        return [part_of(blocks, self._layout.num_kv_heads, rank, num_ranks) for rank in range(num_ranks)]

    def close(self) -> None:
        del self.memory
        self._undo.close()
