"""On a device that goes on by itself, steps with prompts have one behind them: who goes on, and who sits out a step."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tandem.errors import InternalError
from tandem.types import GroupSpec, Handle, TokenId
from tests.decode_rows import feeds_of

MakeSpec = Callable[..., GroupSpec]
Completion = Callable[..., list[TokenId]]


def chunks_of(bench: Any, step: int) -> list[tuple[int, int]]:
    """Context and tokens of each chunk."""
    return [(chunk.context_len, len(chunk.token_ids)) for chunk in bench.engine.steps[step].chunks]


def rows_of(bench: Any, step: int) -> list[int]:
    """The feed of each row."""
    found = bench.engine.steps[step]
    return feeds_of(found)[: 0 if found.rows is None else len(found.rows)]


async def test_a_prompt_goes_on_behind_its_own_chunk_beside_a_stream_that_is_fed(
    open_bench: Any, make_spec: MakeSpec, completion: Completion
) -> None:
    async with open_bench(is_asynchronous=True, chunk_tokens=4) as bench:
        bench.engine.hold()
        old = bench.reserve(1, make_spec(3, 30), local_prefill=True)
        bench.engine.allow(2)  # a first decode shows how long they take
        await bench.engine.until_launched(4)
        assert [rows_of(bench, step) for step in (1, 2, 3)] == [[-1], [-1], [0]]
        new = bench.reserve(2, make_spec(11, 3, salt=1), local_prefill=True)
        bench.engine.allow(2)
        await bench.engine.until_launched(6)
        assert [rows_of(bench, step) for step in (4, 5)] == [[0], [0]]
        assert [chunks_of(bench, step) for step in (4, 5)] == [[(0, 4)], [(4, 4)]]
        assert [step.continues for step in bench.engine.steps] == [False] * 5 + [True]
        bench.engine.let_go()
        await bench.router.until(lambda: {old, new} == set(bench.router.ended))
        assert bench.router.tokens[new] == completion(make_spec(11, 3, salt=1))
        assert bench.router.tokens[old] == completion(make_spec(3, 30))


async def test_a_sequence_whose_prompt_ends_in_the_running_step_sits_out_one(
    open_bench: Any, make_spec: MakeSpec, completion: Completion
) -> None:
    async with open_bench(is_asynchronous=True) as bench:
        bench.engine.hold()
        short, long = make_spec(3, 6), make_spec(40, 6, n=2, salt=1)
        handles = [
            bench.reserve(number, spec, local_prefill=True) for number, spec in enumerate((short, long), start=1)
        ]
        await bench.engine.until_launched(2)
        assert chunks_of(bench, 0) == [(0, 3), (0, 13)]
        assert (rows_of(bench, 1), chunks_of(bench, 1)) == ([], [(13, 16)])
        bench.engine.allow()
        await bench.engine.until_launched(3)
        assert (rows_of(bench, 2), chunks_of(bench, 2)) == ([-1], [(29, 11)])
        bench.engine.let_go()
        await bench.router.until(lambda: set(handles) == set(bench.router.ended))
        assert bench.router.tokens[handles[0]] == completion(short)
        assert [bench.router.choices[handles[1], index] for index in (0, 1)] == [completion(long, i) for i in (0, 1)]


async def test_a_chunk_behind_one_that_breaks_fails_too_and_the_cache_learns_nothing(
    open_bench: Any, make_spec: MakeSpec, completion: Completion
) -> None:
    async with open_bench(is_asynchronous=True) as bench:
        bench.engine.errors[0] = ZeroDivisionError()
        spec = make_spec(40, 3)
        broken = bench.reserve(1, spec, local_prefill=True)
        await bench.router.until(lambda: broken in bench.router.errors)
        assert isinstance(bench.router.errors[broken], InternalError)
        again = bench.reserve(2, spec, local_prefill=True)
        await bench.router.until(lambda: again in bench.router.ended)
        assert bench.router.tokens[again] == completion(spec)
        assert bench.cache.counters.hit_tokens == 0


async def test_a_request_that_is_released_under_two_chunks_gives_its_blocks_back(
    open_bench: Any, make_spec: MakeSpec
) -> None:
    async with open_bench(is_asynchronous=True, chunk_tokens=4) as bench:
        bench.engine.hold()
        gone = bench.reserve(1, make_spec(20, 3), local_prefill=True)
        await bench.engine.until_launched(2)
        bench.worker.release(bench.router, gone)
        assert bench.pool.counts().live == 2
        bench.engine.let_go()


@pytest.mark.parametrize("seed", range(12))
async def test_tokens_are_the_same_with_and_without_steps_behind_prompts(
    open_bench: Any, make_spec: MakeSpec, completion: Completion, seed: int
) -> None:
    rng = random.Random(seed)
    specs = [make_spec(rng.randint(1, 40), rng.randint(1, 12), n=rng.choice((1, 1, 2)), salt=n % 5) for n in range(14)]
    told = []
    for is_asynchronous in (False, True):
        sizes = {"num_blocks": 48, "max_seqs": 6, "chunk_tokens": 7}
        async with open_bench(**sizes, is_asynchronous=is_asynchronous) as bench:
            handles = [bench.reserve(number, spec, local_prefill=True) for number, spec in enumerate(specs)]
            await bench.router.until(lambda bench=bench, handles=handles: set(handles) == set(bench.router.ended))
            told.append({(h, c.index): bench.router.choices[h, c.index] for h in handles for c in specs[h].choices})
            behind = [step for step in bench.engine.steps if step.continues]
            assert bool(behind) is is_asynchronous
    assert told[0] == told[1]
    assert told[0] == {(Handle(n), c.index): completion(s, c.index) for n, s in enumerate(specs) for c in s.choices}
