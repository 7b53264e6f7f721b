"""Rows of host memory hashed, and copied in the same pass: in C++ where that was built, else by numpy and xxhash."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import xxhash

from kernels.cpu import library
from kernels.cpu.row_digest import MIN_ROW_BYTES, RowDigest

Rows = npt.NDArray[np.uint8]
"""`[N, row_bytes]` uint8, contiguous."""

_PIECE_BYTES = 128 * 1024
"""Hashed, then copied, while it is in the cache of one core."""


def row_checksums(rows: Rows, ids: Sequence[int]) -> tuple[int, ...]:
    """xxh3-64 with seed 0 of each row as it lies in memory now."""
    native = _native(rows.shape[1])
    if native is not None:
        return native.digests(rows, ids)
    return tuple(xxhash.xxh3_64_intdigest(rows[row].data) for row in ids)


def copy_rows(rows: Rows, ids: Sequence[int], targets: Rows, target_ids: Sequence[int]) -> tuple[int, ...]:
    """Copies row `ids[i]` to row `target_ids[i]` of `targets`. Returns the checksums of what was copied."""
    native = _native(rows.shape[1])
    if native is not None:
        return native.copy(rows, ids, targets, target_ids)
    return tuple(_copy_row(rows[row], targets[target]) for row, target in zip(ids, target_ids, strict=True))


def _copy_row(row: Rows, target: Rows) -> int:
    digest = xxhash.xxh3_64()
    for start in range(0, len(row), _PIECE_BYTES):
        piece = row[start : start + _PIECE_BYTES]
        digest.update(piece.data)
        np.copyto(target[start : start + _PIECE_BYTES], piece)
    return digest.intdigest()


def _native(row_bytes: int) -> RowDigest | None:
    return _built() if row_bytes >= MIN_ROW_BYTES else None


@cache
def _built() -> RowDigest | None:
    return RowDigest(library.Library()) if library.obstacle() is None else None
