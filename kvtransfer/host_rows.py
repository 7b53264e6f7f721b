"""Rows of bytes in host memory, as lanes send, receive and verify them."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterable
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvtransfer.row_copy import Rows, row_checksums

RowIds: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]
"""`[n]`."""
_MADV_POPULATE_WRITE = 23
"""Linux 5.14; Python has no name for it."""
_PIECE_BYTES = 2 * 1024 * 1024
"""Populated in one call of the kernel, about 1 ms: `close` waits for no more."""


class HostRows:
    """Borrows `rows` until `close`; never frees or resizes it."""

    def __init__(self, rows: Rows) -> None:
        """`rows` `[R, row_bytes]` uint8, contiguous."""
        self.rows = rows
        self._row_bytes: int = rows.shape[1]
        self._bytes = rows.reshape(-1).data  # [R * row_bytes]
        self._is_touched = np.zeros(len(rows), bool)
        self._populating = threading.Lock()

    def spans(self, rows: Iterable[int]) -> list[memoryview]:
        """The rows' bytes in order, writable, runs of neighbours as one span."""
        runs: list[tuple[int, int]] = []
        for row in rows:
            if runs and row == runs[-1][0] + runs[-1][1]:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((row, 1))
        return [self._span(first, n) for first, n in runs]

    def checksums(self, rows: Iterable[int]) -> tuple[int, ...]:
        """xxh3-64 of each row as it lies in memory now."""
        return row_checksums(self.rows, tuple(rows))

    def untouched(self, rows: RowIds) -> RowIds:
        """Those of `rows` that were never returned here before: for `populate`."""
        found = rows[~self._is_touched[rows]]
        self._is_touched[found] = True
        return found

    def populate(self, rows: RowIds) -> None:
        """Makes the memory of these rows real and maps it, so that whoever writes there meets no page fault.

        Leaves what lies there. For a thread of its own; a no-op where the system has no such call.
        """
        madvise = _madvise()
        if madvise is None:
            return
        step = max(1, _PIECE_BYTES // self._row_bytes)
        for run in np.split(rows, np.flatnonzero(np.diff(rows.astype(np.int64)) != 1) + 1):
            for start in range(0, len(run), step):
                with self._populating:
                    if not len(self.rows):
                        return  # closed
                    begin = self.rows.ctypes.data + int(run[start]) * self._row_bytes
                    end = begin + len(run[start : start + step]) * self._row_bytes
                    begin -= begin % mmap.PAGESIZE
                    madvise(begin, end - begin, _MADV_POPULATE_WRITE)  # where it fails, whoever writes there will tell

    def close(self) -> None:
        """Lets go of the memory. Idempotent."""
        with self._populating:
            self._bytes.release()
            self.rows = np.empty((0, self._row_bytes), np.uint8)

    def _span(self, first: int, num_rows: int = 1) -> memoryview:
        return self._bytes[first * self._row_bytes : (first + num_rows) * self._row_bytes]


@cache
def _madvise() -> Any | None:
    """The system's call; None = it has no such one."""
    if not hasattr(mmap.mmap, "madvise"):
        return None
    call = ctypes.CDLL(None).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return call
