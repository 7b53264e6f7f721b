"""Choices that share their prompt's blocks: forked, copied on write, preempted and started again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.group import Group
from engine.runner import Runner
from tandem.errors import FrameError, InternalError
from tandem.first_tokens import NextTokens
from tandem.types import ChoiceSpec, GroupSpec, RequestId, SamplingParams, TokenId
from tests.unit.engine.conftest import GroupDriver

BLOCK_SIZE = 4
PROMPT = (3, 1, 4, 1, 5, 9)


def spec_of(*outputs: tuple[int, ...], prompt: tuple[int, ...] = PROMPT, **sampling) -> GroupSpec:
    params = SamplingParams(**{"max_tokens": 9, "temperature": 6.0, "seed": 5, **sampling})
    choices = tuple(ChoiceSpec(index, tuple(map(TokenId, output))) for index, output in enumerate(outputs))
    return GroupSpec(RequestId("r"), tuple(map(TokenId, prompt)), params, choices)


class Worker(GroupDriver):
    """Runs groups to their end, every seq in each step."""

    def step(self, group: Group) -> None:
        ran = self.run(group)
        if not group.is_forked:
            group.fork(self._pool)
        for _, drawers, outputs in ran:
            for seq, (token,) in zip(drawers, outputs, strict=True):
                if seq.append_token(token.token_id):
                    self._pool.release(seq.take_blocks())

    def finish(self, group: Group) -> list[tuple[int, ...]]:
        while not group.is_finished:
            self.step(group)
        return [each.output_token_ids for each in group.sequences]


@pytest.fixture
def worker(decoder, kv_cache, pool) -> Worker:
    return Worker(Runner(decoder, kv_cache), pool)


def singles(worker: Worker, spec: GroupSpec) -> list[tuple[int, ...]]:
    """Each choice as a request of its own."""
    return [
        worker.finish(
            Group(replace(spec, sampling=spec.sampling.of_choice(n), choices=(ChoiceSpec(0, each.output_token_ids),)))
        )[0]
        for n, each in enumerate(spec.choices)
    ]


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("length", [4, 6, 7])
def test_choices_equal_requests_of_their_own_with_the_derived_seeds(worker, pool, count: int, length: int) -> None:
    spec = spec_of(*[()] * count, prompt=(3, 1, 4, 1, 5, 9, 2)[:length])
    completions = worker.finish(Group(spec))
    assert completions == singles(worker, spec)
    assert len(set(completions)) == count
    pool.assert_idle()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_a_preempted_group_starts_again_and_ends_with_the_same_tokens(worker, pool, kv_cache, num_steps, count) -> None:
    spec = spec_of(*[()] * count, max_tokens=6)
    group = Group(spec)
    for _ in range(num_steps):
        worker.step(group)
    num_free = pool.num_free + group.num_own_blocks(pool)
    worker.preempt(group)
    assert pool.num_free == num_free == pool.num_blocks
    assert (group.is_forked, group.holds_blocks) == (False, False)
    kv_cache.fill_poison()
    assert worker.finish(group) == singles(worker, spec)


def test_a_group_resumed_in_part_goes_on_as_it_would_have(worker) -> None:
    whole = worker.finish(Group(spec_of((), (), ())))
    outputs = (whole[0][:4], (), whole[2][:1])
    group = Group(spec_of(*outputs))
    assert [each.index for each in group.prefix.drawers] == [1]
    assert group.num_remaining_tokens == len(PROMPT) + 5
    assert worker.finish(group) == whole


def test_choices_share_all_but_the_block_that_they_write(worker, pool) -> None:
    group = Group(spec_of((), (), ()))
    worker.step(group)
    assert pool.counts().live == 2
    assert group.num_unused_slots(BLOCK_SIZE) == BLOCK_SIZE - len(PROMPT) % BLOCK_SIZE
    worker.step(group)  # position 6 lies in the second block; the last holder writes it where it is
    assert pool.counts().live == 4
    assert group.num_unused_slots(BLOCK_SIZE) == 3 * (BLOCK_SIZE - len(PROMPT) % BLOCK_SIZE - 1)
    tables = [list(each.block_table) for each in group.sequences]
    assert len({table[0] for table in tables}) == 1
    assert len({table[1] for table in tables}) == 3
    assert group.num_own_blocks(pool) == 4


def test_a_block_that_a_cache_counts_on_is_copied_even_if_it_has_one_holder(worker, pool) -> None:
    group = Group(spec_of(()))
    worker.step(group)
    kept = group.sequences[0].block_table[1]
    pool.keep((kept,))
    assert group.needs_copy(group.sequences[0], pool)
    worker.step(group)
    assert group.sequences[0].block_table[1] != kept
    assert pool.counts().cached == 1


def test_received_blocks_become_every_choices(worker, pool) -> None:
    group = Group(spec_of((), (7,), ()))
    with pytest.raises(InternalError, match="first tokens"):
        group.land(pool.allocate(2), {0: TokenId(1)}, pool)
    blocks = pool.allocate(2)
    group.land(blocks, {0: TokenId(8), 2: TokenId(9)}, pool)
    assert [each.output_token_ids for each in group.sequences] == [(8,), (7,), (9,)]
    assert {pool.ref_count(block) for block in blocks} == {3}
    with pytest.raises(InternalError, match="forks once"):
        group.fork(pool)


@pytest.mark.parametrize(
    "told",
    [
        {0: (8, 9)},
        {0: (8, 9), 1: (7,), 2: (7,)},
        {0: (8, 9), 1: ()},
        {0: (8,), 1: (7,)},
        {0: (6, 9), 1: (7,)},
    ],
    ids=[
        "one is missing",
        "one is not due",
        "nothing new",
        "nothing new behind what is known",
        "another than is known",
    ],
)
def test_tokens_that_do_not_go_on_from_those_that_are_known_are_refused(told: dict[int, tuple[TokenId, ...]]) -> None:
    group = Group(spec_of((5, 8), (5,)))
    assert group.unknown_tokens(NextTokens({0: (TokenId(8), TokenId(9)), 1: (TokenId(7),)})) == {0: (9,), 1: (7,)}
    with pytest.raises(FrameError):
        group.unknown_tokens(NextTokens(told))
