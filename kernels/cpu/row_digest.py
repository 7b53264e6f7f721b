"""xxh3-64 of rows of bytes, and rows copied while they are hashed, in C++ (`src/row_digest.cpp`).

One call takes any number of rows without the interpreter's lock; from Python, a thread would have to win that lock
back after each row, 5 ms from a loop that computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64, c_void_p

import numpy as np
import numpy.typing as npt

from kernels.cpu.library import Library
from tandem.errors import InternalError

Rows = npt.NDArray[np.uint8]

MIN_ROW_BYTES = 241
"""Shorter rows are hashed by other formulas, which are not here."""
_KEEP_LOCK_BYTES = 256 * 1024
"""About 25 µs: up to here the interpreter's lock is kept, since to win it back may take longer."""


class RowDigest:
    """Rows are `[N, row_bytes]` uint8, contiguous, of `MIN_ROW_BYTES` or more. Raises InternalError by name."""

    __slots__ = ("_copy", "_digest")

    def __init__(self, library: Library) -> None:
        digest = (c_void_p, c_void_p, c_int64, c_int64, c_void_p)
        copy = (c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p)
        # By whether the lock is kept.
        self._digest = [library.bind("row_digests", *digest, keeps_gil=keeps) for keeps in (False, True)]
        self._copy = [library.bind("copy_rows", *copy, keeps_gil=keeps) for keeps in (False, True)]

    def digests(self, rows: Rows, ids: Sequence[int]) -> tuple[int, ...]:
        """The digest of each row that `ids` names, seed 0."""
        named, found = _named("rows", rows, ids), np.empty(len(ids), np.uint64)
        call = self._digest[named.size * rows.shape[1] <= _KEEP_LOCK_BYTES]
        call(rows.ctypes.data, named.ctypes.data, named.size, rows.shape[1], found.ctypes.data)
        return tuple(found.tolist())

    def copy(self, rows: Rows, ids: Sequence[int], targets: Rows, target_ids: Sequence[int]) -> tuple[int, ...]:
        """Copies row `ids[i]` to row `target_ids[i]` of `targets`, which overlap nowhere; returns the rows' digests."""
        named, into, found = (
            _named("rows", rows, ids),
            _named("targets", targets, target_ids),
            np.empty(len(ids), np.uint64),
        )
        if named.size != into.size or rows.shape[1] != targets.shape[1]:
            raise InternalError(
                f"{named.size} rows of {rows.shape[1]} do not fit {into.size} of {targets.shape[1]} bytes"
            )
        call = self._copy[named.size * rows.shape[1] <= _KEEP_LOCK_BYTES]
        data, row_bytes = (rows.ctypes.data, named.ctypes.data, targets.ctypes.data, into.ctypes.data), rows.shape[1]
        call(*data, named.size, row_bytes, found.ctypes.data)
        return tuple(found.tolist())


def _named(name: str, rows: Rows, ids: Sequence[int]) -> npt.NDArray[np.int64]:
    """`ids` as C++ reads them, checked: memory outside of `rows` is never touched."""
    if rows.dtype != np.uint8 or rows.ndim != 2 or not rows.flags.c_contiguous or rows.shape[1] < MIN_ROW_BYTES:
        raise InternalError(f"{name}: {rows.dtype} {rows.shape}; needs uint8 [N, {MIN_ROW_BYTES} or more], contiguous")
    named = np.fromiter(ids, np.int64, len(ids))
    if named.size and not 0 <= named.min() <= named.max() < len(rows):
        raise InternalError(f"{name}: ids {named.min()} to {named.max()} leave the {len(rows)} rows")
    return named
