"""Rows of host memory: hashed and copied the same with and without the compiled library, and made real ahead."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import xxhash

from kvtransfer import rows as rows_module
from kvtransfer.rows import Rows
from tests.kv_ends import Recorder, paired, until

ROW_BYTES = 3 * mmap.PAGESIZE // 2
NUM_ROWS = 64


@pytest.fixture(params=["native", "plain"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "plain":
        monkeypatch.setattr(rows_module, "_built", lambda: None)
    elif rows_module._built() is None:
        pytest.skip("the native kernels were not built")


@pytest.mark.parametrize("row_bytes", [16, 240, 241, 4096, 3 * 128 * 1024 + 5])
def test_checksums_are_of_the_rows_named_and_copies_are_whole(either: None, row_bytes: int) -> None:
    source = np.random.default_rng(0).integers(0, 256, (4, row_bytes), np.uint8)
    target = np.zeros((6, row_bytes), np.uint8)
    expected = tuple(xxhash.xxh3_64_intdigest(source[i].tobytes()) for i in (2, 0, 3))
    assert Rows(source).checksums((2, 0, 3)) == expected
    assert Rows(source).copy_to(Rows(target), (2, 0, 3), (5, 1, 4)) == expected
    assert np.array_equal(target[[5, 1, 4]], source[[2, 0, 3]])
    assert not target[[0, 2, 3]].any()


@pytest.fixture
def fd() -> Iterator[int]:
    """A memory file without a page."""
    fd = os.memfd_create("rows")
    os.ftruncate(fd, NUM_ROWS * ROW_BYTES)
    yield fd
    os.close(fd)


def rows_of(fd: int) -> Rows:
    mapping = mmap.mmap(fd, NUM_ROWS * ROW_BYTES)
    return Rows(np.frombuffer(mapping, np.uint8).reshape(NUM_ROWS, ROW_BYTES))


def real_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


@pytest.mark.skipif(sys.platform != "linux", reason="needs MADV_POPULATE_WRITE")
def test_pages_of_the_rows_alone_become_real_and_keep_what_lies_there(fd: int) -> None:
    rows = rows_of(fd)
    rows.array[5] = 7
    before = real_bytes(fd)
    rows.populate(np.array([4, 5, 20], np.uint32))

    pages_more = (real_bytes(fd) - before) // mmap.PAGESIZE
    assert 3 <= pages_more <= 4, "of rows 4 and 20 at most"
    assert (rows.array[5] == 7).all()
    assert not rows.array[4].any()


def test_each_row_is_untouched_once(fd: int) -> None:
    rows = rows_of(fd)
    assert rows.untouched(np.array([3, 9], np.uint32)).tolist() == [3, 9]
    assert rows.untouched(np.array([9, 4], np.uint32)).tolist() == [4]
    assert rows.untouched(np.array([3, 4], np.uint32)).tolist() == []


def test_nothing_is_populated_after_the_end(fd: int) -> None:
    rows = rows_of(fd)
    rows.close()
    rows.populate(np.arange(8, dtype=np.uint32))
    assert real_bytes(fd) == 0


def drop_pages(fd: int) -> None:
    size = os.fstat(fd).st_size
    os.ftruncate(fd, 0)
    os.ftruncate(fd, size)


@pytest.mark.skipif(sys.platform != "linux", reason="needs MADV_POPULATE_WRITE")
async def test_both_ends_of_a_hand_off_populate_its_blocks_before_anything_is_pushed(recorder: Recorder) -> None:
    async with paired("shm") as pair:
        drop_pages(pair.target.fd)
        offer = pair.offer(recorder)
        await until(lambda: real_bytes(pair.target.fd))

        drop_pages(pair.target.fd)
        handoff = await pair.open(offer)
        await until(lambda: real_bytes(pair.target.fd))
        await handoff.abort()
