"""Copies between a pool and its mirror: which rows, on which thread, and when they have ended."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator

import pytest
import torch

from engine.kv_cache import KvCache
from engine.mirror import PoolMirror
from tandem.errors import TransferError
from tandem.kv_layout import DType, KvLayout
from tandem.types import BlockId

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, block_size=4, head_dim=8, dtype=DType.FLOAT32)
NUM_BLOCKS = 16


@pytest.fixture
def cache() -> Iterator[KvCache]:
    cache = KvCache.create(LAYOUT, NUM_BLOCKS, torch.device("cpu"), shared=True, mirrored=True)
    yield cache
    cache.close()
    cache.close()


def rows(*block_ids: int) -> list[BlockId]:
    return [BlockId(block_id) for block_id in block_ids]


def mirror_of(cache: KvCache) -> PoolMirror:
    assert cache.mirror is not None
    return cache.mirror


def test_only_a_pool_out_of_reach_has_a_mirror(cache: KvCache) -> None:
    plain = KvCache.create(LAYOUT, 2, torch.device("cpu"))
    assert plain.mirror is None
    assert plain.host_blocks.data_ptr() == plain.blocks_view.data_ptr()
    assert mirror_of(cache)
    assert cache.host_blocks.data_ptr() != cache.blocks_view.data_ptr()
    assert cache.host_blocks.shape == cache.blocks_view.shape


@pytest.mark.parametrize("seed", range(4))
async def test_a_copy_moves_the_named_blocks_and_no_others(cache: KvCache, seed: int) -> None:
    chosen = random.Random(seed).sample(range(NUM_BLOCKS), 9)
    cache.blocks_view.copy_(torch.arange(NUM_BLOCKS, dtype=torch.uint8)[:, None] + 1)
    cache.host_blocks.zero_()
    await mirror_of(cache).copy_out(rows(*chosen))
    assert cache.host_blocks[:, 0].tolist() == [block + 1 if block in chosen else 0 for block in range(NUM_BLOCKS)]
    assert cache.host_blocks[:, -1].tolist() == cache.host_blocks[:, 0].tolist()
    cache.host_blocks.add_(100)
    await mirror_of(cache).copy_in(rows(*chosen[:4]))
    expected = [block + 101 if block in chosen[:4] else block + 1 for block in range(NUM_BLOCKS)]
    assert cache.blocks_view[:, 0].tolist() == expected


async def test_no_blocks_are_no_copy(cache: KvCache) -> None:
    await mirror_of(cache).copy_out([])


def test_poison_reaches_the_mirror(cache: KvCache) -> None:
    cache.fill_poison()
    assert bool(cache.host_blocks.view(torch.float32).isnan().all())


async def test_a_cancelled_copy_ends_before_its_caller_goes_on(cache: KvCache) -> None:
    mirror, go, begun = mirror_of(cache), threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        go.wait(10)

    blocked = asyncio.get_running_loop().run_in_executor(mirror._thread, hold)
    await asyncio.to_thread(begun.wait, 10)
    cache.blocks_view.fill_(7)
    cache.host_blocks.zero_()
    copy = asyncio.create_task(mirror.copy_out(rows(3)))
    await asyncio.sleep(0)
    copy.cancel()
    await asyncio.sleep(0)
    assert not copy.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await copy
    assert int(cache.host_blocks[3, 0]) == 7
    await blocked


async def test_a_copy_that_the_device_refuses_is_a_failed_transfer() -> None:
    narrow = PoolMirror(torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(4, 6, dtype=torch.uint8))
    with pytest.raises(TransferError, match="1 blocks"):
        await narrow.copy_out(rows(0))
    narrow.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
async def test_a_pool_on_a_gpu_is_mirrored_in_pinned_shared_memory() -> None:
    cache = KvCache.create(LAYOUT, NUM_BLOCKS, torch.device("cuda", 0), shared=True)
    try:
        assert cache.shared_fd is not None
        assert cache.host_blocks.is_pinned()
        cache.blocks_view.copy_(torch.randint(0, 256, cache.blocks_view.shape, dtype=torch.uint8))
        torch.cuda.synchronize()
        before, chosen = cache.blocks_view.cpu(), rows(5, 6, 7, 1, 15)
        await mirror_of(cache).copy_out(chosen)
        assert torch.equal(cache.host_blocks[chosen], before[chosen])
        cache.blocks_view.zero_()
        torch.cuda.synchronize()
        await mirror_of(cache).copy_in(chosen)
        assert torch.equal(cache.blocks_view.cpu()[chosen], before[chosen])
    finally:
        cache.close()
