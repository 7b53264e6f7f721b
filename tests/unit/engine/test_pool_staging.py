"""Copies between a pool and rows of host memory: which ones, on which thread, and when they have ended."""

from __future__ import annotations

import asyncio
import mmap
import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from engine.kv_cache import KvCache
from engine.memory import MIN_RING_ROWS
from engine.pool_staging import PoolStaging
from kvtransfer.rows import Rows
from tandem.errors import TransferError
from tandem.kv_layout import DType, KvLayout
from tandem.types import BlockId
from tests.kernels.devices import needs_gpu

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, block_size=4, head_dim=8, dtype=DType.FLOAT32)
NUM_BLOCKS, RING_ROWS = 40, 16


@pytest.fixture
def cache() -> Iterator[KvCache]:
    cache = KvCache.create(LAYOUT, NUM_BLOCKS, torch.device("cpu"), shared=True, ring_rows=RING_ROWS)
    yield cache
    cache.close()
    cache.close()


class Ring:
    """What a transfer makes of the cache's rows."""

    def __init__(self, cache: KvCache) -> None:
        self.array = cache.host_rows.numpy()


def blocks(*block_ids: int) -> list[BlockId]:
    return [BlockId(block_id) for block_id in block_ids]


def staging_of(cache: KvCache) -> PoolStaging:
    assert cache.staging is not None
    return cache.staging


def test_only_a_pool_out_of_reach_has_a_ring(cache: KvCache) -> None:
    plain = KvCache.create(LAYOUT, 2, torch.device("cpu"))
    assert plain.staging is None
    assert plain.host_rows.data_ptr() == plain.blocks_view.data_ptr()
    assert staging_of(cache).num_blocks == cache.num_blocks == NUM_BLOCKS
    assert cache.host_rows.data_ptr() != cache.blocks_view.data_ptr()
    assert cache.host_rows.shape == (RING_ROWS, LAYOUT.block_bytes)


@pytest.mark.parametrize("seed", range(4))
async def test_a_copy_moves_the_named_blocks_and_no_others(cache: KvCache, seed: int) -> None:
    chance = random.Random(seed)
    chosen, rows = blocks(*chance.sample(range(NUM_BLOCKS), 9)), chance.sample(range(RING_ROWS), 9)
    if seed == 0:
        chosen, rows = blocks(*range(5, 14)), list(range(9))  # neighbours on both sides
    cache.blocks_view.copy_(torch.arange(NUM_BLOCKS, dtype=torch.uint8)[:, None] + 1)
    cache.host_rows.zero_()
    await staging_of(cache).copy_out(chosen, Ring(cache), rows)
    lies_in = dict(zip(rows, chosen, strict=True))
    assert cache.host_rows[:, 0].tolist() == [lies_in[row] + 1 if row in lies_in else 0 for row in range(RING_ROWS)]
    assert cache.host_rows[:, -1].tolist() == cache.host_rows[:, 0].tolist()
    cache.host_rows.add_(100)
    targets = blocks(*chance.sample(range(NUM_BLOCKS), 4))
    await staging_of(cache).copy_in(Ring(cache), rows[:4], targets)
    came = {target: chosen[i] + 101 for i, target in enumerate(targets)}
    assert cache.blocks_view[:, 0].tolist() == [came.get(block, block + 1) for block in blocks(*range(NUM_BLOCKS))]


async def test_a_cancelled_copy_ends_before_its_caller_goes_on(cache: KvCache) -> None:
    staging, go, begun = staging_of(cache), threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        go.wait(10)

    blocked = asyncio.get_running_loop().run_in_executor(staging._thread, hold)
    await asyncio.to_thread(begun.wait, 10)
    cache.blocks_view.fill_(7)
    cache.host_rows.zero_()
    copy = asyncio.create_task(staging.copy_out(blocks(30), Ring(cache), [3]))
    await asyncio.sleep(0)
    copy.cancel()
    await asyncio.sleep(0)
    assert not copy.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await copy
    assert int(cache.host_rows[3, 0]) == 7
    await blocked


async def test_a_copy_that_the_device_refuses_is_a_failed_transfer_and_holds_no_rows() -> None:
    staging = PoolStaging(torch.zeros(4, 8, dtype=torch.uint8))
    memory = mmap.mmap(-1, 4 * 6)
    rows = Rows(np.frombuffer(memory, np.uint8).reshape(4, 6))
    with pytest.raises(TransferError, match="1 blocks") as failure:
        await staging.copy_out(blocks(0), rows, [0])
    rows.close()
    memory.close()  # it would refuse if the error's traceback held a view of it
    assert failure.value.__traceback__ is not None
    staging.close()


@needs_gpu
def test_a_pool_on_a_gpu_has_a_ring_in_pinned_shared_memory() -> None:
    cache = KvCache.create(LAYOUT, NUM_BLOCKS, torch.device("cuda", 0), shared=True)
    try:
        assert cache.shared_fd is not None
        assert cache.host_rows.is_pinned()
        assert len(cache.host_rows) == MIN_RING_ROWS
        cache.blocks_view.copy_(torch.randint(0, 256, cache.blocks_view.shape, dtype=torch.uint8))
        torch.cuda.synchronize()
        before, chosen, rows = cache.blocks_view.cpu(), blocks(5, 6, 37, 1, 15), [2, 3, 4, 0, 9]
        asyncio.run(staging_of(cache).copy_out(chosen, Ring(cache), rows))
        assert torch.equal(cache.host_rows[rows], before[chosen])
        cache.blocks_view.zero_()
        torch.cuda.synchronize()
        asyncio.run(staging_of(cache).copy_in(Ring(cache), rows, chosen))
        assert torch.equal(cache.blocks_view.cpu()[chosen], before[chosen])
    finally:
        cache.close()
