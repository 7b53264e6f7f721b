"""Prompts computed and decoded in one worker give transformers' tokens, however steps are cut."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tandem.types import GroupSpec, TokenId

LENGTHS = (1, 2, 15, 16, 17, 31, 33, 64, 65, 100)
MAX_TOKENS = 20

MakeSpec = Callable[..., GroupSpec]
Reference = Callable[[GroupSpec], list[TokenId]]


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
@pytest.mark.parametrize("chunk_tokens", [16, 512])
async def test_a_ragged_batch_gives_the_reference_tokens(
    open_bench: Any, make_spec: MakeSpec, reference: Reference, block_size: int, chunk_tokens: int
) -> None:
    specs = [make_spec(length, MAX_TOKENS) for length in LENGTHS]
    num_blocks = sum(-(-(length + MAX_TOKENS + 32) // block_size) for length in LENGTHS) + 16
    async with open_bench(block_size, num_blocks, chunk_tokens=chunk_tokens) as bench:
        assert await bench.complete(specs) == [[reference(spec)] for spec in specs]
        assert bench.worker.load().preemptions == 0


@pytest.mark.parametrize(
    ("block_size", "host_cache_bytes", "disk_cache_bytes"),
    [(1, 0, 0), (4, 0, 0), (4, 1 << 14, 0), (4, 1 << 20, 0), (4, 1 << 14, 1 << 20)],
)
async def test_a_pool_that_is_far_too_small_gives_the_same_tokens(
    open_bench: Any,
    make_spec: MakeSpec,
    reference: Reference,
    block_size: int,
    host_cache_bytes: int,
    disk_cache_bytes: int,
) -> None:
    """Preempted sequences find their blocks again, in the pool or in a tier behind it, and compute what was lost."""
    lengths = (17, 18, 19, 20, 21, 22)
    specs = [make_spec(length, 120) for length in lengths]
    num_blocks = (22 + 120) // block_size + 40 // block_size
    sizes = {"host_cache_bytes": host_cache_bytes, "disk_cache_bytes": disk_cache_bytes}
    async with open_bench(block_size, num_blocks, chunk_tokens=16, **sizes) as bench:
        bench.engine.cache._costs.computed(1, 1e9)  # on so small a model, computing is cheaper than moving
        assert await bench.complete(specs) == [[reference(spec)] for spec in specs]
        assert bench.worker.load().preemptions > 0
        assert (bench.engine.cache.counters.host_loaded_blocks > 0) == (host_cache_bytes > 0)
        assert (bench.engine.cache.counters.disk_stored_blocks > 0) == (disk_cache_bytes > 0)


@pytest.mark.parametrize("block_size", [4, 16])
async def test_steps_behind_prompts_as_on_a_gpu_give_the_same_tokens(
    open_bench: Any, make_spec: MakeSpec, reference: Reference, block_size: int
) -> None:
    specs = [make_spec(length, MAX_TOKENS) for length in LENGTHS]
    async with open_bench(block_size, 1024 // block_size, chunk_tokens=16, is_asynchronous=True) as bench:
        assert await bench.complete(specs) == [[reference(spec)] for spec in specs]


async def test_one_step_at_a_time_gives_the_same_tokens(
    open_bench: Any, make_spec: MakeSpec, reference: Reference
) -> None:
    specs = [make_spec(length, MAX_TOKENS) for length in LENGTHS]
    async with open_bench(overlap_steps=False) as bench:
        assert await bench.complete(specs) == [[reference(spec)] for spec in specs]


async def test_fewer_seats_than_sequences_give_the_same_tokens(
    open_bench: Any, make_spec: MakeSpec, reference: Reference
) -> None:
    specs = [make_spec(length, MAX_TOKENS) for length in LENGTHS]
    async with open_bench(max_seqs=3) as bench:
        assert await bench.complete(specs) == [[reference(spec)] for spec in specs]


@pytest.mark.parametrize("host_cache_bytes", [0, 1 << 20], ids=["", "with a host tier"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
async def test_conversations_that_evict_each_other_give_the_reference_tokens(
    open_bench: Any, make_spec: MakeSpec, reference: Reference, block_size: int, host_cache_bytes: int
) -> None:
    """Some turns find all that was said, some a part of it, some nothing any more, or all in the host tier."""
    turns = [make_spec(length, 12) for length in (17, 30, 43)]
    async with open_bench(block_size, 160 // block_size, chunk_tokens=16, host_cache_bytes=host_cache_bytes) as bench:
        bench.engine.cache._costs.computed(1, 1e9)  # on so small a model, computing may be cheaper than moving
        for said in range(3):
            for number, spec in enumerate(turns):
                ((answer,),) = await bench.complete([spec])
                assert answer == reference(spec)
                more = spec.prompt_token_ids[: 5 + said]
                turns[number] = replace(spec, prompt_token_ids=(*spec.prompt_token_ids, *answer, *more))
        counters = bench.engine.cache.counters
        assert 0 < counters.hit_tokens < counters.asked_tokens
        assert counters.evicted_blocks
        assert (counters.host_loaded_blocks > 0) == (host_cache_bytes > 0)


@pytest.mark.parametrize("block_size", [1, 4, 16])
async def test_conversations_that_come_back_from_the_disk_give_the_reference_tokens(
    open_bench: Any, make_spec: MakeSpec, reference: Reference, block_size: int
) -> None:
    """Pool and host tier hold one turn each; some are read from the disk before they are wanted, some too late."""
    turns = [make_spec(length, 12) for length in (17, 30, 43, 45)]
    sizes = {"host_cache_bytes": 96 * 1024, "disk_cache_bytes": 1 << 20}
    async with open_bench(block_size, 128 // block_size, chunk_tokens=16, **sizes) as bench:
        cache = bench.engine.cache
        cache._costs.computed(1, 1e9)  # on so small a model, computing may be cheaper than moving
        cache._evictor._num_rows_ahead = cache._host.rows.num_rows
        for said in range(3):
            for number, spec in enumerate(turns):
                cache.prefetch(spec.cache_salt, spec.prompt_token_ids)
                while number % 2 and cache._disk._num_jobs:
                    await asyncio.sleep(0.001)
                    cache._evictor.note_disk()
                ((answer,),) = await bench.complete([spec])
                assert answer == reference(spec)
                more = spec.prompt_token_ids[: 5 + said]
                turns[number] = replace(spec, prompt_token_ids=(*spec.prompt_token_ids, *answer, *more))
        assert cache.counters.disk_stored_blocks > cache.counters.disk_loaded_blocks > 0
        assert not cache.counters.disk_failed_blocks
