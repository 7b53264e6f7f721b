"""One seq's list of block ids, kept as an array so that a step's batch copies it in one go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from tandem.types import BlockId


class BlockTable(Sequence[BlockId]):
    """Grows at the end. Reads like a tuple of ints; numpy reads it as `[num_blocks]` int32.

    An array taken from it stays valid and unchanged while the table grows.
    """

    __slots__ = ("_buffer", "_length")

    def __init__(self, blocks: Sequence[BlockId] = ()) -> None:
        self._buffer: npt.NDArray[np.int32] = np.array(blocks, dtype=np.int32)
        self._length = len(blocks)

    def extend(self, blocks: Sequence[BlockId]) -> None:
        """Appends blocks, amortized O(1) each."""
        end = self._length + len(blocks)
        if end > len(self._buffer):
            grown = np.empty(max(8, 2 * end), dtype=np.int32)
            grown[: self._length] = self._buffer[: self._length]
            self._buffer = grown
        self._buffer[self._length : end] = blocks
        self._length = end

    def replace(self, index: int, block: BlockId) -> None:
        """Puts another block at `index`; arrays taken before keep the old one."""
        if not 0 <= index < self._length:
            raise IndexError(index)
        self._buffer = self._buffer.copy()
        self._buffer[index] = block

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> BlockId: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[BlockId, ...]: ...
    def __getitem__(self, index: int | slice) -> BlockId | tuple[BlockId, ...]:
        if isinstance(index, slice):
            return tuple(self._buffer[: self._length][index].tolist())
        if not -self._length <= index < self._length:
            raise IndexError(index)
        return BlockId(int(self._buffer.item(index if index >= 0 else self._length + index)))

    def __iter__(self) -> Iterator[BlockId]:
        return iter(self._buffer[: self._length].tolist())

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[np.int32]:
        blocks = self._buffer[: self._length]
        if copy or (dtype is not None and np.dtype(dtype) != blocks.dtype):
            return blocks.astype(dtype or np.int32)
        return blocks

    def __repr__(self) -> str:
        return f"BlockTable({list(self)})"
