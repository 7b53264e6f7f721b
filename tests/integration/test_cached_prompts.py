"""Prompts that share prefixes, on real worker cores with little room: every token is right, whatever was found."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from tandem.types import GroupSpec, RequestId, Role, SamplingParams, TokenId
from tests.decode_rows import seqs_of
from tests.joined_cores import JoinedCores, Running
from tests.token_engine import WAIT_S, expected_tokens
from tests.wire import BLOCK_SIZE

SALTS = ("", "a", "b")


def spec_of(prompt: list[int], *, salt: str = "", max_tokens: int = 6) -> GroupSpec:
    sampling = SamplingParams(max_tokens=max_tokens)
    return GroupSpec(RequestId("r"), tuple(map(TokenId, prompt)), sampling, cache_salt=salt)


async def finish(cores: JoinedCores, running: list[Running]) -> None:
    """All of them, with exactly their tokens."""
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*(each.task for each in running))
    assert [each.tokens for each in running] == [expected_tokens(each.spec) for each in running]
    cores.check_invariants()


def num_prefilled(cores: JoinedCores) -> int:
    """Prompt tokens that the prefill worker has computed."""
    return sum(len(seq.token_ids) for step in cores.engines[Role.PREFILL].steps for seq in seqs_of(step))


async def test_each_turn_of_a_conversation_computes_what_is_new() -> None:
    async with JoinedCores() as cores:
        prompt = list(range(1, 15))
        for turn in range(4):
            before = num_prefilled(cores)
            running = cores.start(spec_of(prompt))
            await finish(cores, [running])
            new = num_prefilled(cores) - before
            assert new == 14 if turn == 0 else new <= 6 + 5 + BLOCK_SIZE
            prompt += [*running.tokens, *range(100, 105)]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    ("prefill_blocks", "decode_blocks", "host_rows", "disk_slots"),
    [(32, 64, 0, 0), (9, 12, 0, 0), (16, 12, 0, 0), (9, 12, 6, 0), (12, 10, 40, 0), (9, 12, 6, 30)],
)
async def test_random_prompts_that_share_prefixes_give_their_tokens(
    seed: int, prefill_blocks: int, decode_blocks: int, host_rows: int, disk_slots: int
) -> None:
    rng = random.Random(seed)
    known: list[list[int]] = [[]]
    sizes = {"prefill_blocks": prefill_blocks, "decode_blocks": decode_blocks}
    async with JoinedCores(**sizes, host_rows=host_rows, disk_slots=disk_slots) as cores:
        for cache in cores.caches.values() if disk_slots else ():
            cache._evictor._num_rows_ahead = 4  # so that much goes to disk
        for _ in range(6):
            specs = []
            for _ in range(rng.randint(1, 5)):
                stem = rng.choice(known)
                prompt = stem[: rng.randint(0, len(stem))] + [rng.randrange(3) for _ in range(rng.randint(1, 12))]
                known.append(prompt[:24])
                specs.append(spec_of(prompt[:30], salt=rng.choice(SALTS), max_tokens=rng.randint(1, 6)))
            running = [cores.start(spec) for spec in specs]
            for each in running:
                if rng.random() < 0.2:
                    await asyncio.sleep(0)
                    each.task.cancel()
            await asyncio.gather(*(each.task for each in running), return_exceptions=True)
            await finish(cores, [each for each in running if not each.task.cancelled()])
            known += [[*each.spec.prompt_token_ids, *each.tokens][:24] for each in running]


async def test_both_workers_look_on_disk_when_a_request_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    async with JoinedCores() as cores:
        asked: dict[Role, list[tuple[TokenId, ...]]] = {role: [] for role in Role}
        for role, cache in cores.caches.items():
            monkeypatch.setattr(cache, "prefetch", lambda _, tokens, role=role: asked[role].append(tuple(tokens)))
        running = cores.start(spec_of(list(range(1, 15))))
        await finish(cores, [running])
        prompt = running.spec.prompt_token_ids
        assert asked[Role.PREFILL] == [prompt]
        assert asked[Role.DECODE][0] == prompt


async def test_a_failed_step_leaves_nothing_that_a_later_prompt_finds() -> None:
    prompt = list(range(1, 40))
    for number in range(5):  # the steps of the prompt
        async with JoinedCores() as cores:
            cores.engines[Role.PREFILL].errors[number] = RuntimeError("broken")
            with pytest.raises(Exception, match="a step failed"):
                await cores.start(spec_of(prompt)).task
            await finish(cores, [cores.start(spec_of(prompt))])


async def test_equal_prompts_of_other_salts_share_nothing() -> None:
    async with JoinedCores() as cores:
        spec = spec_of(list(range(1, 15)))
        for number, salt in enumerate(SALTS, 1):
            await finish(cores, [cores.start(replace(spec, cache_salt=salt))])
            assert num_prefilled(cores) == 14 * number
