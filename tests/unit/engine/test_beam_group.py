"""Beams that fork and die over one pool: they read the KV of their own tokens, and give back all that they held."""

from __future__ import annotations

import pytest
import torch

from engine.beam import BeamSearch, num_candidates
from engine.beam_group import BeamGroup, candidates_of, new_group
from engine.draws import SampleSpec
from engine.group import Group
from engine.runner import Runner
from engine.step import BrokenLogits
from tandem.errors import InternalError
from tandem.types import Candidates, ChoiceSpec, GroupSpec, RequestId, SamplingParams, TokenId
from tests.drawing import history, sample
from tests.unit.engine.conftest import GroupDriver

BLOCK_SIZE, VOCAB_SIZE = 4, 97
PROMPT = (3, 1, 4, 1, 5, 9)
MAX_TOKENS = 11


def spec_of(width: int, num_prompt_tokens: int = 6, **more) -> GroupSpec:
    params = SamplingParams(**{"max_tokens": MAX_TOKENS, "beam_width": width, "length_penalty": 0.5, **more})
    choices = tuple(map(ChoiceSpec, range(width)))
    return GroupSpec(RequestId("r"), tuple(map(TokenId, PROMPT[:num_prompt_tokens])), params, choices)


def expected(spec: GroupSpec) -> list[tuple[tuple[int, ...], float]]:
    """The same search over the sum of all tokens itself (`conftest.SumDecoder`), without any blocks."""
    search, beams = BeamSearch(spec.sampling), [()]
    while not search.is_done:
        drawn = [_candidates(spec, beam) for beam in beams]
        beams = [(*beams[parent], token_id) for parent, token_id in search.advance(drawn)]
    return [_said(search.best(index)) for index in range(spec.num_seqs)]


def _candidates(spec: GroupSpec, output: tuple[int, ...]) -> Candidates:
    logits = -(torch.arange(VOCAB_SIZE) - (sum(spec.prompt_token_ids) + sum(output)) % VOCAB_SIZE).abs().float()
    seen = history(spec.prompt_token_ids, output)
    count = num_candidates(spec.sampling)
    (sampled,) = sample(logits[None], [SampleSpec(spec.sampling, len(output), seen, num_candidates=count)])
    assert not isinstance(sampled, BrokenLogits)
    return candidates_of(sampled)


def _said(hypothesis) -> tuple[tuple[int, ...], float]:
    return tuple(each.token_id for each in hypothesis.tokens), hypothesis.score


class Worker(GroupDriver):
    """Runs one group to its end, as few or as many beams per step as it is told."""

    def step(self, group: BeamGroup) -> None:
        for seq, _, outputs in self.run(group):
            for sampled in outputs:
                for table in group.draw(seq, candidates_of(sampled), self._pool):
                    self._pool.release(table)
            if not group.is_forked and not group.is_finished:
                group.fork(self._pool)

    def finish(self, group: BeamGroup) -> list[tuple[tuple[int, ...], float]]:
        while not group.is_finished:
            self.step(group)
        self.preempt(group)
        return [_said(group.best(index)) for index in range(group.spec.num_seqs)]


@pytest.fixture
def worker(decoder, kv_cache, pool) -> Worker:
    return Worker(Runner(decoder, kv_cache), pool)


@pytest.mark.parametrize("width", [2, 3, 5, 8])
@pytest.mark.parametrize("num_prompt_tokens", [1, 3, 4, 6])
def test_beams_read_their_own_tokens_across_borders_of_blocks(worker, width: int, num_prompt_tokens: int) -> None:
    spec = spec_of(width, num_prompt_tokens)
    found = worker.finish(BeamGroup(spec))
    assert found == expected(spec)
    assert len({tokens for tokens, _ in found}) == width


@pytest.mark.parametrize(
    "more",
    [
        {"end_token_ids": frozenset(map(TokenId, range(20, 40)))},
        {"end_token_ids": frozenset(map(TokenId, range(30, 97))), "min_tokens": 3},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
        {"logit_bias": {TokenId(50): 3.0}, "max_tokens": 1},
    ],
)
def test_ends_penalties_and_biases_are_each_beams_own(worker, more) -> None:
    spec = spec_of(4, **more)
    assert worker.finish(BeamGroup(spec)) == expected(spec)


@pytest.mark.parametrize("seqs_per_step", [1, 2, 3])
def test_beams_that_step_one_after_the_other_wait_for_each_other(decoder, kv_cache, pool, seqs_per_step: int) -> None:
    spec = spec_of(4)
    worker = Worker(Runner(decoder, kv_cache), pool, seqs_per_step)
    assert worker.finish(BeamGroup(spec)) == expected(spec)


@pytest.mark.parametrize("seqs_per_step", [1, 99])
@pytest.mark.parametrize("num_steps", range(1, 9))
def test_a_preempted_search_goes_on_from_its_tokens(
    decoder, kv_cache, pool, num_steps: int, seqs_per_step: int
) -> None:
    spec, group = spec_of(4, repetition_penalty=1.1), BeamGroup(spec_of(4, repetition_penalty=1.1))
    worker = Worker(Runner(decoder, kv_cache), pool, seqs_per_step)
    for _ in range(num_steps):
        worker.step(group)
    worker.preempt(group)
    kv_cache.fill_poison()
    assert (group.is_forked, group.holds_blocks) == (False, False)
    assert worker.finish(group) == expected(spec)


def test_beams_share_what_they_have_in_common(worker, pool) -> None:
    """Never more than the prompt once and a tail for each; and less than that where beams descend from one."""
    spec = spec_of(8, max_tokens=20)
    worker.finish(BeamGroup(spec))
    assert worker.most_live < spec.max_pool_tokens(BLOCK_SIZE) // BLOCK_SIZE


def test_candidates_that_were_received_start_the_search(worker, pool, kv_cache) -> None:
    spec = spec_of(3)
    group, elsewhere = new_group(spec), BeamGroup(spec)
    assert isinstance(group, BeamGroup)
    assert (group.num_seats, elsewhere.num_seats) == (3, 3)
    blocks = pool.allocate(2)
    with pytest.raises(InternalError, match="not candidates"):
        group.land(blocks, {0: TokenId(1)}, pool)
    group.land(blocks, _candidates(spec, ()), pool)
    assert len(group.running) == 3
    assert {pool.ref_count(block) for block in blocks} == {3}
    for table in group.take_blocks():
        pool.release(table)
    assert worker.finish(group) == expected(spec)


def test_first_tokens_are_no_start_of_a_group_that_wants_none(pool) -> None:
    spec = GroupSpec(RequestId("r"), (TokenId(1),), SamplingParams(max_tokens=3))
    with pytest.raises(InternalError, match="first tokens"):
        Group(spec).land((), ((TokenId(1), -1.0),), pool)
