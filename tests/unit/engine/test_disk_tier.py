"""Blocks that go to a file and come back, and a file that fails or has other bytes."""

from __future__ import annotations

import os
import threading
import time

import pytest

from engine.block_pool import BlockPool
from engine.disk_tier import DiskJob, DiskTier
from engine.host_tier import HostTier
from engine.prefix_cache import PrefixCache

BLOCK_BYTES, SIZE = 8, 4
TOKENS = tuple(map(ord, "aaaabbbbccccx"))


@pytest.fixture
def disk(tmp_path):
    disk = DiskTier(tmp_path, 3, BLOCK_BYTES)
    yield disk
    disk.close()
    disk.close()


@pytest.fixture
def host():
    host = HostTier(3, BLOCK_BYTES)
    yield host
    host.close()


@pytest.fixture
def cache(host, disk):
    cache = PrefixCache(BlockPool(4, SIZE), tier=host, disk=disk)
    cache._evictor._num_rows_ahead = 3  # all that a step has moved to the host tier goes on to the disk
    for row in range(3):
        host.row(row)[:] = bytes([row]) * BLOCK_BYTES
    blocks = cache.allocate(3)
    cache.insert("", TOKENS, blocks)
    cache.pool.release(blocks)
    cache.pool.release(cache.allocate(4))
    step(cache)
    yield cache
    cache.clear()
    until_idle(cache)
    cache.check_invariants()


def job(slot, data, *, is_read=False, checksum=0):
    return DiskJob(slot, 0, memoryview(bytearray(data)), is_read=is_read, checksum=checksum)


def run(disk, *jobs):
    """Until they are done."""
    for each in jobs:
        disk.submit(each)
    done, deadline = [], time.monotonic() + 20
    while len(done) < len(jobs):
        assert time.monotonic() < deadline
        time.sleep(0.001)
        done += disk.take_done()
    return done


def step(cache):
    cache.take_moves()
    cache.step_ended(failed=False)


def until_idle(cache):
    deadline = time.monotonic() + 20
    while cache._disk._num_jobs:
        assert time.monotonic() < deadline
        time.sleep(0.001)
        cache._evictor.note_disk()


def to_disk(cache):
    step(cache)
    until_idle(cache)
    assert cache.counters.disk_stored_blocks == 3
    assert cache.match("", TOKENS) == 0


def test_what_is_written_comes_back(disk):
    first, second = job(0, b"eight by"), job(2, b"and more")
    assert run(disk, first, second) == [first, second]
    back = job(2, bytes(BLOCK_BYTES), is_read=True, checksum=second.checksum)
    run(disk, back)
    assert bytes(back.memory) == b"and more"
    assert back.is_intact
    assert back.error is None


def test_other_bytes_than_were_written_are_found_out(disk):
    written = job(1, b"eight by")
    run(disk, written)
    os.pwrite(disk._file.fileno(), b"E", BLOCK_BYTES)
    back = job(1, bytes(BLOCK_BYTES), is_read=True, checksum=written.checksum)
    run(disk, back)
    assert not back.is_intact


def test_a_read_goes_before_writes_that_wait(disk):
    """So a slot may be written again as soon as its read was submitted."""
    begin, written = threading.Event(), job(0, b"eight by")
    run(disk, written)
    do, disk._do = disk._do, lambda each: (begin.wait(20), do(each))
    back = job(0, bytes(BLOCK_BYTES), is_read=True, checksum=written.checksum)
    jobs = [job(1, b"is first"), job(0, b"replaces"), back]
    for each in jobs:
        disk.submit(each)
    begin.set()
    run(disk, job(2, b"the last"))
    assert back.is_intact
    assert bytes(back.memory) == b"eight by"


def test_the_file_has_its_whole_size_and_no_name(disk, tmp_path):
    assert list(tmp_path.iterdir()) == []
    status = os.fstat(disk._file.fileno())
    assert status.st_size == 3 * BLOCK_BYTES
    assert status.st_nlink == 0


def test_an_error_is_told_and_the_thread_goes_on(disk):
    short = DiskJob(0, 0, memoryview(bytearray(3)), is_read=False)
    run(disk, short)
    assert short.error is not None
    good = job(1, b"eight by")
    run(disk, good)
    assert good.error is None


def test_blocks_go_on_to_the_disk_and_come_back_ahead_of_their_use(cache, host):
    content = [bytes(host.row(row)) for row in range(3)]
    to_disk(cache)
    assert cache._host.rows.num_free == 3
    for row in range(3):
        host.row(row)[:] = bytes(BLOCK_BYTES)
    cache.prefetch("", TOKENS)
    until_idle(cache)
    assert cache.match("", TOKENS) == 12
    moves = {move.block: bytes(host.row(move.row)) for move in _moves_of(cache)}
    assert sorted(moves.values()) == sorted(content)
    assert cache.counters.disk_loaded_blocks == 3


def _moves_of(cache):
    blocks = cache.acquire("", TOKENS)
    moves = cache.take_moves()
    cache.step_ended(failed=False)
    cache.pool.release(blocks)
    return moves


def test_what_has_not_arrived_is_computed(cache, disk):
    to_disk(cache)
    arrived = threading.Event()
    do, disk._do = disk._do, lambda each: (arrived.wait(20), do(each))
    cache.prefetch("", TOKENS)
    assert not cache.acquire("", TOKENS)
    blocks = cache.allocate(3)
    cache.insert("", TOKENS, blocks)
    cache.pool.release(blocks)
    assert cache.match("", TOKENS) == 12
    arrived.set()


def test_a_block_that_the_disk_has_not_kept_is_not_known_nor_what_follows_it(cache, disk):
    to_disk(cache)
    (node,) = cache._tree.nodes()
    os.pwrite(disk._file.fileno(), b"other", node.places[1] * BLOCK_BYTES)
    cache.prefetch("", TOKENS)
    until_idle(cache)
    assert cache.match("", TOKENS) == 4
    assert cache.counters.disk_failed_blocks == 1
    cache.check_invariants()


def test_damage_is_logged_at_the_first_block_and_whenever_it_has_doubled(cache, disk, caplog):
    to_disk(cache)
    os.pwrite(disk._file.fileno(), b"elsewise" * 3, 0)
    cache.prefetch("", TOKENS)
    until_idle(cache)
    assert cache.counters.disk_failed_blocks == 3
    warned = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [record.fields["blocks"] for record in warned] == [1, 2]


def test_a_disk_that_fails_is_not_used_any_more(cache, disk, host):
    to_disk(cache)
    disk._file.truncate(0)
    cache.prefetch("", TOKENS)
    until_idle(cache)
    assert cache.match("", TOKENS) == 0
    assert cache.counters.disk_failed_blocks == 3
    assert cache._host.rows.num_free == 3
    blocks = cache.allocate(3)
    cache.insert("", TOKENS, blocks)
    cache.pool.release(blocks)
    cache.pool.release(cache.allocate(4))
    step(cache)
    step(cache)
    assert cache.match("", TOKENS) == 12, "it stays in the host tier"
