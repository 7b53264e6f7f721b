"""Rows of bytes in host memory, as lanes send, receive, copy and verify them.

Hashes and copies run in C++ where that was built, else in numpy and xxhash.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from kernels.cpu import library
from kernels.cpu.row_digest import MIN_ROW_BYTES, RowDigest

ByteRows: TypeAlias = npt.NDArray[np.uint8]
"""`[R, row_bytes]`, contiguous."""
RowIds: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]
"""`[n]`."""
XXH3 = "xxh3-64"
"""Name of a row's checksum, in HELLO: xxh3-64 with seed 0 over its bytes, computed on the host."""
_MADV_POPULATE_WRITE = 23
"""Linux 5.14; Python has no name for this advice."""
_POPULATED_BYTES = 2 * 1024 * 1024
"""Populated in one call of the kernel, about 1 ms: `close` waits for no more."""
_COPIED_BYTES = 128 * 1024
"""Bytes hashed, then copied, while the cache of one core holds these bytes."""


class Rows:
    """Rows of bytes; borrows `array` until `close`, never frees or resizes that array."""

    def __init__(self, array: ByteRows) -> None:
        self.array = array
        """`[R, row_bytes]`; `[0, row_bytes]` once closed."""
        self.row_bytes: int = array.shape[1]
        self._bytes = array.reshape(-1).data  # [R * row_bytes]
        self._is_touched = np.zeros(len(array), bool)
        self._populating = threading.Lock()

    def cut(self, count: int) -> Rows:
        """Returns the same memory as rows of a `count`-th of the bytes, to be closed first."""
        return Rows(self.array.reshape(len(self.array) * count, -1))

    def spans(self, ids: Iterable[int]) -> list[memoryview]:
        """Returns the rows' bytes in order, writable; neighbouring rows share a span."""
        runs: list[tuple[int, int]] = []
        for row in ids:
            if runs and row == runs[-1][0] + runs[-1][1]:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((row, 1))
        size = self.row_bytes
        return [self._bytes[first * size : (first + count) * size] for first, count in runs]

    def checksums(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Returns xxh3-64 with seed 0 of each row as it lies in memory now."""
        native = _native(self.row_bytes)
        if native is not None:
            return native.digests(self.array, tuple(ids))
        return tuple(xxhash.xxh3_64_intdigest(self.array[row].data) for row in ids)

    def copy_to(self, target: Rows, ids: Sequence[int], target_ids: Sequence[int]) -> tuple[int, ...]:
        """Copies row `ids[i]` to row `target_ids[i]` of `target`. Returns the checksums of what was copied."""
        native = _native(self.row_bytes)
        if native is not None:
            return native.copy(self.array, ids, target.array, target_ids)
        pairs = zip(ids, target_ids, strict=True)
        return tuple(_copy_row(self.array[row], target.array[to]) for row, to in pairs)

    def untouched(self, ids: RowIds) -> RowIds:
        """Returns those of `ids` that no call returned before: the rows to `populate`."""
        found = ids[~self._is_touched[ids]]
        self._is_touched[found] = True
        return found

    def populate(self, ids: RowIds) -> None:
        """Makes the memory of these rows real and maps it, so that a writer meets no page fault there.

        Leaves their content. For a thread of its own; a no-op where the system has no such call.
        """
        madvise = _madvise()
        if madvise is None:
            return
        step = max(1, _POPULATED_BYTES // self.row_bytes)
        for run in np.split(ids, np.flatnonzero(np.diff(ids.astype(np.int64)) != 1) + 1):
            for start in range(0, len(run), step):
                with self._populating:
                    if not len(self.array):
                        return  # closed
                    begin = self.array.ctypes.data + int(run[start]) * self.row_bytes
                    end = begin + len(run[start : start + step]) * self.row_bytes
                    begin -= begin % mmap.PAGESIZE
                    madvise(begin, end - begin, _MADV_POPULATE_WRITE)  # where it fails, the writer will find out

    def close(self) -> None:
        """Gives the memory back. Idempotent."""
        with self._populating:
            self._bytes.release()
            self.array = np.empty((0, self.row_bytes), np.uint8)


def _copy_row(row: ByteRows, target: ByteRows) -> int:
    digest = xxhash.xxh3_64()
    for start in range(0, len(row), _COPIED_BYTES):
        piece = row[start : start + _COPIED_BYTES]
        digest.update(piece.data)
        np.copyto(target[start : start + _COPIED_BYTES], piece)
    return digest.intdigest()


def _native(row_bytes: int) -> RowDigest | None:
    return _built() if row_bytes >= MIN_ROW_BYTES else None


@cache
def _built() -> RowDigest | None:
    return RowDigest(library.Library()) if library.obstacle() is None else None


@cache
def _madvise() -> Any | None:
    """Returns the system's call, or None where there is none."""
    if not hasattr(mmap.mmap, "madvise"):
        return None
    call = ctypes.CDLL(None).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return call
