"""Digests of rows in C++ against the xxhash library, on every tier that runs here."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from kernels.cpu.library import Library
from kernels.cpu.row_digest import MIN_ROW_BYTES, RowDigest
from tandem.errors import InternalError
from tests.kernels.tiers import TIERS

pytestmark = pytest.mark.native

SIZES = (MIN_ROW_BYTES, 255, 256, 257, 1023, 1024, 1025, 1088, 1089, 2048, 4999, 16384, 300_001)
"""Around the stripes of 64 bytes, the 16 of them between two scramblings, and beyond what keeps the lock."""


@pytest.fixture(params=TIERS)
def row_digest(request):
    return RowDigest(Library(request.param))


def _rows(row_bytes: int, num_rows: int = 5) -> np.ndarray:
    return np.random.default_rng(row_bytes).integers(0, 256, (num_rows, row_bytes), np.uint8)


@pytest.mark.parametrize("row_bytes", SIZES)
def test_a_digest_is_xxh3_of_the_row(row_digest, row_bytes):
    rows = _rows(row_bytes)
    assert row_digest.digests(rows, (3, 0, 3)) == tuple(xxhash.xxh3_64_intdigest(rows[i].data) for i in (3, 0, 3))
    assert row_digest.digests(rows, ()) == ()


@pytest.mark.parametrize("row_bytes", SIZES)
def test_a_copy_is_whole_and_touches_no_other_row(row_digest, row_bytes):
    rows, targets = _rows(row_bytes), np.zeros((7, row_bytes), np.uint8)
    assert row_digest.copy(rows, (4, 1), targets, (0, 5)) == row_digest.digests(rows, (4, 1))
    assert np.array_equal(targets[[0, 5]], rows[[4, 1]])
    assert not targets[[1, 2, 3, 4, 6]].any()


@pytest.mark.parametrize("row_bytes", [131_072, 262_144, 300_032])
@pytest.mark.parametrize("shift", [0, 16])
def test_a_copy_past_the_caches_is_whole_and_touches_no_other_row(row_digest, row_bytes, shift):
    """Rows of stripes alone, into targets on a line of the cache, or not."""
    rows, memory = _rows(row_bytes), np.zeros(4 * row_bytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + shift
    targets = memory[start:][: 4 * row_bytes].reshape(4, row_bytes)
    assert row_digest.copy(rows, (4, 1), targets, (0, 2)) == row_digest.digests(rows, (4, 1))
    assert np.array_equal(targets[[0, 2]], rows[[4, 1]])
    assert not targets[[1, 3]].any()
    assert not memory[:start].any()


@pytest.mark.parametrize("ids", [(5,), (-1,), (0, 2**40)])
def test_ids_outside_of_the_rows_are_refused_by_name(row_digest, ids):
    rows = _rows(512)
    with pytest.raises(InternalError, match="rows: ids"):
        row_digest.digests(rows, ids)
    with pytest.raises(InternalError, match="targets: ids"):
        row_digest.copy(rows, (0,) * len(ids), np.zeros_like(rows), ids)


def test_rows_that_do_not_fit_are_refused_by_name(row_digest):
    for rows in (_rows(MIN_ROW_BYTES - 1), _rows(512)[:, :300], _rows(512)[0], _rows(512).view(np.int8)):
        with pytest.raises(InternalError, match="rows: "):
            row_digest.digests(rows, (0,))
    with pytest.raises(InternalError, match="do not fit"):
        row_digest.copy(_rows(512), (0,), _rows(513), (0,))
    with pytest.raises(InternalError, match="do not fit"):
        row_digest.copy(_rows(512), (0, 1), _rows(512), (0,))
