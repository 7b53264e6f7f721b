"""A router's attempts on real worker cores: what waits in a line holds no blocks, and is not taken for lost."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from tandem.errors import Unavailable
from tandem.types import Role, WaitReason
from tests.joined_cores import SILENCE_S, JoinedCores, Running, spec_of
from tests.token_engine import WAIT_S, expected_tokens

LONG_S = 6 * SILENCE_S
"""After which whoever has not been heard of is given up."""


async def finish(running: list[Running]) -> None:
    """All of them, with exactly their tokens, each on its first pair."""
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*(each.task for each in running))
    assert [each.tokens for each in running] == [expected_tokens(each.spec) for each in running]


async def test_prompts_in_the_prefill_line_hold_no_decode_blocks_and_preempt_nobody() -> None:
    async with JoinedCores(prefill_blocks=16, decode_blocks=40) as cores:
        streams = [cores.start(spec_of(8, 40, salt)) for salt in (1, 2)]
        await cores.until(lambda: all(len(each.tokens) >= 2 for each in streams))
        cores.engines[Role.PREFILL].hold()
        num_steps = cores.engines[Role.PREFILL].num_steps
        burst = [cores.start(spec_of(40, 4, salt)) for salt in range(3, 11)]
        await cores.engines[Role.PREFILL].until_launched(num_steps + 1)  # of the first; no second one fits there
        await finish(streams)
        assert cores.decode.load().preemptions == 0
        pool = cores.decode.load().pool
        assert (pool.reserved + pool.receiving, pool.live) == (10, 0)
        assert cores.decode.load().waiting_seqs == 0
        cores.engines[Role.PREFILL].let_go()
        await finish(burst)


async def test_a_computed_prompt_waits_for_room_in_the_prefill_pool_and_its_first_token_does_not() -> None:
    async with JoinedCores(prefill_blocks=16, decode_blocks=16) as cores:
        cores.engines[Role.DECODE].hold()
        running = [cores.start(spec_of(40, 12))]
        await cores.until(lambda: cores.decode.load().running_seqs == 1)
        running += [cores.start(spec_of(32, 12, salt)) for salt in (1, 2)]
        await cores.until(lambda: all(len(each.tokens) == 1 for each in running))
        assert cores.decode.load().pool.reserved == 0
        assert cores.prefill.load().pool.live == 16
        for _ in range(4):  # the first one goes on: it says so by its tokens
            cores.engines[Role.DECODE].allow()
            await cores.time_passes(SILENCE_S / 2)
        assert cores.num_waiting(Role.PREFILL) == {WaitReason.GRANT: 2}
        assert cores.num_waiting(Role.DECODE) == {WaitReason.ROOM: 2}
        cores.engines[Role.DECODE].let_go()
        await finish(running)


async def test_a_prompt_in_line_for_longer_than_the_silence_is_not_given_up() -> None:
    async with JoinedCores(prefill_blocks=8) as cores:
        cores.engines[Role.PREFILL].hold()
        running = [cores.start(spec_of(32, 4, salt)) for salt in range(3)]
        await cores.engines[Role.PREFILL].until_launched(1)
        await cores.time_passes(LONG_S)
        assert cores.num_waiting(Role.PREFILL) == {WaitReason.PROMPT: 1, WaitReason.PREFILL_LINE: 2}
        cores.engines[Role.PREFILL].let_go()
        await finish(running)


async def test_a_landed_sequence_that_waits_for_a_seat_is_not_given_up() -> None:
    async with JoinedCores(max_seqs=2) as cores:
        cores.engines[Role.DECODE].hold()
        running = [cores.start(spec_of(8, 12, salt)) for salt in range(3)]
        await cores.until(lambda: all(each.tokens for each in running) and not cores.prefill.load().live_transfers)
        for _ in range(4):  # the ones with seats go on: they say so by their tokens
            cores.engines[Role.DECODE].allow()
            await cores.time_passes(SILENCE_S / 2)
        assert cores.num_waiting(Role.DECODE) == {WaitReason.SEAT: 1}
        cores.engines[Role.DECODE].let_go()
        await finish(running)


async def test_a_preempted_sequence_is_not_given_up() -> None:
    async with JoinedCores(decode_blocks=12) as cores:
        running = [cores.start(spec_of(8, 30, salt)) for salt in range(2)]
        engine = cores.engines[Role.DECODE]
        engine.hold()
        while not cores.decode.load().preemptions:
            if engine.num_in_flight:
                engine.allow()
            await asyncio.sleep(0.001)
        for _ in range(6):
            engine.allow()
            await cores.time_passes(SILENCE_S / 2)
        assert cores.num_waiting(Role.DECODE)[WaitReason.PREEMPTED] == 1
        engine.let_go()
        await finish(running)


async def test_a_beam_search_that_tells_nothing_before_its_end_is_not_given_up() -> None:
    async with JoinedCores() as cores:
        engine = cores.engines[Role.DECODE]
        engine.hold()
        plain = spec_of(9, 12)
        running = cores.start(replace(plain, sampling=replace(plain.sampling, beam_width=3)))
        await engine.until_launched(1)
        await cores.time_passes(LONG_S)
        assert cores.num_waiting(Role.DECODE) == {WaitReason.SEARCH: 1}
        assert running.tokens == []
        engine.let_go()
        await finish([running])


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_request_that_its_worker_forgot_is_given_up_though_the_others_are_named(role: Role) -> None:
    async with JoinedCores(max_seqs=1) as cores:
        cores.engines[role].hold()
        forgotten, kept = (cores.start(spec_of(16, 8, salt)) for salt in range(2))
        await cores.until(lambda: len(cores.links[role].handles) == 2)
        core = cores.prefill if role is Role.PREFILL else cores.decode
        core.release(cores.links[role], cores.links[role].handles[0])
        await cores.time_passes(LONG_S)
        assert isinstance(forgotten.task.exception(), Unavailable)
        kept.task.cancel()


@pytest.mark.parametrize("seed", range(12))
async def test_small_pools_on_both_sides_never_wait_for_each_other(seed: int) -> None:
    draw = random.Random(seed)
    async with JoinedCores(
        prefill_blocks=draw.randint(8, 20), decode_blocks=draw.randint(12, 24), max_seqs=draw.randint(1, 4)
    ) as cores:
        running = []
        for salt in range(16):
            spec = spec_of(draw.randint(1, 32), draw.randint(1, 16), salt, priority=draw.randint(0, 1))
            running.append(cores.start(spec))
            for _ in range(draw.randint(0, 8)):
                await asyncio.sleep(0)
            if draw.random() < 0.25:
                draw.choice(running).task.cancel()
        async with asyncio.timeout(WAIT_S):
            await asyncio.wait({each.task for each in running})
        await finish([each for each in running if not each.task.cancelled()])
