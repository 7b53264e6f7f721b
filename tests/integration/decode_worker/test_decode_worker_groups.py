"""A request of n choices gives what n requests with the derived seeds give, in fewer blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tandem.errors import DeadlineExceeded
from tandem.types import ChoiceSpec, GroupSpec, TokenId

MAX_TOKENS = 20

MakeSpec = Callable[..., GroupSpec]


def singles(spec: GroupSpec) -> list[GroupSpec]:
    """One request per choice."""
    return [replace(spec, sampling=spec.sampling.of_choice(c.index), choices=(ChoiceSpec(0),)) for c in spec.choices]


async def complete_singles(bench: Any, spec: GroupSpec) -> list[list[TokenId]]:
    return [tokens for (tokens,) in await bench.complete(singles(spec))]


@pytest.mark.parametrize(
    ("n", "temperature", "overlap_steps"),
    [
        (1, 0.0, True),
        (1, 1.0, False),
        (2, 0.0, False),
        (2, 1.0, True),
        (4, 0.0, True),
        (4, 1.0, False),
        (16, 0.0, False),
        (16, 1.0, True),
    ],
)  # every pair of values
async def test_choices_are_single_requests_with_seeds_of_their_own(
    open_bench: Any, make_spec: MakeSpec, n: int, temperature: float, overlap_steps: bool
) -> None:
    specs = [make_spec(length, MAX_TOKENS, n=n, temperature=temperature, seed=7) for length in (1, 16, 40)]
    async with open_bench(num_blocks=256, max_seqs=48, overlap_steps=overlap_steps) as bench:
        expected = [await complete_singles(bench, spec) for spec in specs]
        assert await bench.complete(specs) == expected
        assert len({tuple(tokens) for tokens in expected[0]}) == (n if temperature else 1)
        assert bench.worker.load().preemptions == 0


@pytest.mark.parametrize("block_size", [1, 4, 16, 64, 256])
async def test_prompts_that_end_before_at_and_behind_a_border_of_blocks_are_shared_exactly(
    open_bench: Any, make_spec: MakeSpec, block_size: int
) -> None:
    lengths = sorted({max(1, block_size - 1), block_size, block_size + 1})
    async with open_bench(block_size, 60 if block_size > 16 else 400) as bench:
        for length in lengths:
            spec = make_spec(length, MAX_TOKENS, n=3, temperature=1.0, seed=length)
            assert await bench.complete([spec]) == [await complete_singles(bench, spec)]


@pytest.mark.parametrize("num_prompt_tokens", [63, 64, 65])
@pytest.mark.parametrize("n", [1, 2, 4, 16])
async def test_a_group_holds_its_prompt_once(
    open_bench: Any, make_spec: MakeSpec, n: int, num_prompt_tokens: int
) -> None:
    spec = make_spec(num_prompt_tokens, MAX_TOKENS, n=n, temperature=1.0)
    shared = num_prompt_tokens // 16
    whole = -(-(num_prompt_tokens + MAX_TOKENS - 1) // 16)  # the last token's KV is never computed
    async with open_bench(16, 256, chunk_tokens=2048, prefix_cache=False) as bench:
        await bench.complete([spec])
        assert bench.router.most_live_blocks == shared + n * (whole - shared)
        apart = [replace(each, cache_salt=f"{number}") for number, each in enumerate(singles(spec))]
        await bench.complete(apart)
        assert bench.router.most_live_blocks == n * whole, "requests of different salts share nothing"


@pytest.mark.parametrize(("block_size", "host_cache_bytes"), [(1, 0), (4, 0), (16, 0), (4, 1 << 20)])
async def test_groups_in_a_pool_that_is_far_too_small_give_the_same_tokens(
    open_bench: Any, make_spec: MakeSpec, block_size: int, host_cache_bytes: int
) -> None:
    specs = [make_spec(17 + i, 120, n=3, temperature=1.0, seed=i) for i in range(3)]
    num_blocks = -(-specs[-1].max_pool_tokens(block_size) // block_size) + 24 // block_size
    async with open_bench(block_size, num_blocks, max_seqs=12, chunk_tokens=16) as bench:
        expected = [await complete_singles(bench, spec) for spec in specs]
    options = {"max_seqs": 12, "chunk_tokens": 16, "host_cache_bytes": host_cache_bytes}
    async with open_bench(block_size, num_blocks, **options) as bench:
        assert await bench.complete(specs) == expected
        assert bench.worker.load().preemptions > 0


async def test_a_resumed_group_goes_on_where_each_choice_was(open_bench: Any, make_spec: MakeSpec) -> None:
    spec = make_spec(21, MAX_TOKENS, n=3, temperature=1.0, seed=5)
    async with open_bench() as bench:
        whole = await complete_singles(bench, spec)
        emitted = (7, 0, 19)
        resumed = [ChoiceSpec(i, tuple(whole[i][:count])) for i, count in enumerate(emitted)]
        handle = bench.reserve(replace(spec, choices=tuple(resumed)), first_offsets=emitted)
        await bench.finish([handle])
        assert bench.router.completions(handle) == [
            tokens[count:] for tokens, count in zip(whole, emitted, strict=True)
        ]
        assert handle in bench.router.cached_tokens


async def test_a_released_group_gives_back_all_its_blocks_and_disturbs_nobody(
    open_bench: Any, make_spec: MakeSpec
) -> None:
    spec = make_spec(40, 60, n=2, temperature=1.0, seed=3)
    async with open_bench(num_blocks=256) as bench:
        expected = await complete_singles(bench, spec)
        doomed = bench.reserve(make_spec(33, 500, n=4, temperature=1.0))
        going = bench.reserve(spec)
        await bench.router.until(lambda: len(bench.router.choices.get((doomed, 3), [])) > 10)
        bench.worker.release(bench.router, doomed)
        await bench.finish([going])
        assert bench.router.completions(going) == expected


async def test_a_group_out_of_time_fails_once_and_gives_back_all_its_blocks(
    open_bench: Any, make_spec: MakeSpec
) -> None:
    async with open_bench(num_blocks=256) as bench:
        late = bench.reserve(make_spec(33, 900, n=4, temperature=1.0, timeout_s=0.2))
        await bench.router.until(lambda: bench.router.errors)
        assert isinstance(bench.router.errors[late], DeadlineExceeded)
