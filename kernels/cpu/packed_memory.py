"""Memory for packed weights: in huge pages where the system has them, so that reading them misses no address lookup.

Weights of a decoder follow one another in chunks; a chunk is freed with its last tensor.
"""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress

import torch

_HUGE_PAGE = 2 << 20
_CHUNK = 32 << 20
_LINE = 64
"""Bytes of a cache line, where tensors begin."""


class PackedMemory:
    """Hands out vectors of bytes that begin on a cache line. For one thread."""

    __slots__ = ("_chunk", "_end", "_start")

    def __init__(self) -> None:
        self._chunk: weakref.ref[mmap.mmap] | None = None
        self._start = self._end = 0  # bytes of the chunk that are free

    def take(self, num_bytes: int) -> torch.Tensor:
        """`[num_bytes]` uint8, not yet written."""
        rounded = -(-num_bytes // _LINE) * _LINE
        chunk = self._chunk and self._chunk()
        if chunk is None or self._end - self._start < rounded:
            chunk = self._open(rounded)
        taken = torch.frombuffer(chunk, dtype=torch.uint8, count=num_bytes, offset=self._start)
        self._start += rounded
        return taken

    def _open(self, num_bytes: int) -> mmap.mmap:
        """Returns a new chunk of at least `num_bytes` bytes that starts on a huge page."""
        size = -(-max(num_bytes, _CHUNK) // _HUGE_PAGE) * _HUGE_PAGE
        chunk = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a system built without them
                chunk.madvise(mmap.MADV_HUGEPAGE)
        self._start = -torch.frombuffer(chunk, dtype=torch.uint8).data_ptr() % _HUGE_PAGE
        self._end = self._start + size
        self._chunk = weakref.ref(chunk)
        return chunk
