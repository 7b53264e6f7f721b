"""Two elastic workers compute prompts for each other, in one pool each, beside what they decode."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tandem.types import WaitReason
from tests.decode_rows import seqs_of
from tests.elastic_cores import NAMES, Asked, ElasticCores
from tests.joined_cores import spec_of
from tests.token_engine import expected_tokens
from tests.wire import BLOCK_SIZE


def check(asked: list[Asked]) -> None:
    for each in asked:
        assert each.choices == [expected_tokens(each.spec, choice.index) for choice in each.spec.choices]


@pytest.mark.parametrize(("prefill", "decode"), [("a", "b"), ("b", "a"), (None, "a")])
async def test_every_placement_gives_the_same_tokens(prefill: str | None, decode: str) -> None:
    async with ElasticCores() as cores:
        asked = [cores.start(spec_of(length, 6, length), prefill, decode) for length in (1, 4, 5, 21)]
        await cores.until_done(asked)
        check(asked)
        assert all(not each.failures for each in asked)


async def test_chunks_of_a_prompt_for_another_worker_are_computed_beside_what_decodes() -> None:
    async with ElasticCores(chunk_tokens=4) as cores:
        stream = cores.start(spec_of(4, 40, 1), None, "a")
        await cores.until(lambda: len(stream.tokens) >= 3)
        prompt = cores.start(spec_of(24, 3, 2), "a", "b")
        await cores.until_done([stream, prompt])
        check([stream, prompt])
        mixed = [
            step for step in cores.engines["a"].steps if sorted(len(seq.token_ids) for seq in seqs_of(step)) == [1, 4]
        ]
        assert len(mixed) == 24 // 4


async def test_prompts_for_others_leave_half_of_the_pool_to_sequences() -> None:
    async with ElasticCores(blocks=(16, 16)) as cores:
        cores.engines["a"].hold()
        asked = [cores.start(spec_of(12, 4, salt), "a", "b") for salt in range(1, 5)]
        await cores.until(lambda: cores.cores["a"].load().waiting_seqs == 2)  # three blocks each: two of them at a time
        load = cores.cores["a"].load()
        assert (load.pool.live, load.queued_prompt_tokens) == (6, 4 * 12)
        assert (load.running_seqs, load.running_for_others, load.waiting_for_others) == (2, 2, 2)
        waits = [reason for _, reason in cores.cores["a"].waits()]
        assert sorted(waits) == [WaitReason.PREFILL_LINE] * 2 + [WaitReason.PROMPT] * 2
        cores.engines["a"].let_go()
        await cores.until_done(asked)
        check(asked)


async def test_two_workers_full_of_each_others_prompts_go_on() -> None:
    """Each prompt takes most of a pool: neither worker has room for the other one's reservation."""
    async with ElasticCores(blocks=(8, 8)) as cores:
        asked = [
            cores.start(spec_of(6 * BLOCK_SIZE, 6, salt), *pair) for salt, pair in enumerate((("a", "b"), ("b", "a")))
        ]
        await cores.until_done(asked)
        check(asked)
        assert any(each.failures for each in asked)


async def test_a_worker_that_drains_finishes_prompts_for_others_and_takes_no_more() -> None:
    async with ElasticCores() as cores:
        cores.engines["a"].hold()
        asked = cores.start(spec_of(20, 5), "a", "b")
        await cores.engines["a"].until_launched(1)
        cores.cores["a"].drain()
        refused = cores.start(spec_of(20, 5, 1), "a", "b")
        await cores.until(lambda: refused.failures)
        refused.task.cancel()
        cores.engines["a"].let_go()
        await cores.until_done([asked])
        check([asked])


@pytest.mark.parametrize("seed", range(20))
async def test_small_pools_never_wait_for_each_other_and_give_every_token(seed: int) -> None:
    draw = random.Random(seed)
    blocks, max_seqs = (draw.randint(9, 24), draw.randint(9, 24)), draw.randint(1, 4)
    kinds: list[dict[str, Any]] = [{}, {"seed": 5}, {"n": 2, "seed": 3}, {"n": 2, "beam_width": 2}]
    async with ElasticCores(blocks=blocks, max_seqs=max_seqs, chunk_tokens=draw.randint(2, 16)) as cores:
        asked: list[Asked] = []
        for salt in range(24):
            decode = draw.choice(NAMES)
            prefill = draw.choice([None, *NAMES[::-1]] if decode == "a" else [None, "a", "a"])
            if prefill == decode:
                prefill = None
            kind = draw.choice(kinds if max_seqs > 1 else kinds[:2])
            spec = spec_of(draw.randint(1, 16 if kind.get("n") else 28), draw.randint(1, 8), salt % 7, **kind)
            asked.append(cores.start(spec, prefill, decode))
            for _ in range(draw.randint(0, 12)):
                await asyncio.sleep(0)
            if draw.random() < 0.15:
                draw.choice(asked).task.cancel()
        await cores.until_done(asked)
        check([each for each in asked if not each.task.cancelled()])
        for cache in cores.caches.values():
            cache.check_invariants()
