"""Log-probabilities of a prompt's own tokens, whatever chunks it is computed in and whatever it shares a batch with."""

from __future__ import annotations

import pytest
import torch

from engine import prompt_scores
from engine.block_pool import BlockPool
from engine.group import Group
from engine.prompt_scores import PromptScores
from engine.runner import Runner
from engine.step import BrokenLogits, ScheduledSeq, Scores, Step
from tandem.errors import InternalError
from tandem.types import ChoiceSpec, GroupSpec, RequestId, SamplingParams, TokenId, TokenLogprobs

VOCAB_SIZE = 97
BLOCK_SIZE = 4
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5)


def group_of(prompt: tuple[int, ...] = PROMPT, num_top: int = 3, num_choices: int = 1) -> Group:
    params = SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=num_top)
    choices = tuple(map(ChoiceSpec, range(num_choices)))
    return Group(GroupSpec(RequestId("r"), tuple(map(TokenId, prompt)), params, choices))


def expected(prompt: tuple[int, ...] = PROMPT, num_top: int = 3) -> list[TokenLogprobs]:
    """By float64 over the whole vocabulary at once; equal ones by id."""
    scores = []
    for position in range(1, len(prompt)):
        logits = -(torch.arange(VOCAB_SIZE) - sum(prompt[:position]) % VOCAB_SIZE).abs().double()
        logprobs = logits.log_softmax(-1).tolist()
        best = sorted(range(VOCAB_SIZE), key=lambda token_id: (-logits[token_id], token_id))[:num_top]
        top = tuple((TokenId(each), pytest.approx(logprobs[each], abs=1e-6)) for each in best)
        scores.append(TokenLogprobs(prompt[position], pytest.approx(logprobs[prompt[position]], abs=1e-6), top))
    return scores


def schedule(group: Group, pool: BlockPool, num_tokens: int) -> ScheduledSeq:
    group.prefix.add_blocks(pool.allocate(group.prefix.blocks_wanted(num_tokens, BLOCK_SIZE)))
    return group.prefix.schedule(num_tokens)


def take(group: Group, scores: Scores) -> list[TokenLogprobs]:
    assert not isinstance(scores, BrokenLogits)
    assert group.prompt_scores is not None
    group.prompt_scores.take(len(scores))
    return list(scores)


@pytest.mark.parametrize("chunks", [(9,), (4, 5), (3, 3, 3), (1,) * 9, (8, 1)])
@pytest.mark.parametrize("num_choices", [1, 3])
def test_every_token_but_the_first_is_scored_once(decoder, kv_cache, chunks, num_choices) -> None:
    pool, runner, group = BlockPool(64, BLOCK_SIZE), Runner(decoder, kv_cache), group_of(num_choices=num_choices)
    scores: list[TokenLogprobs] = []
    for num_tokens in chunks:
        result = runner.run(Step((schedule(group, pool, num_tokens),)))
        scores += take(group, result.scored.get(0, ()))

    assert scores == expected()
    assert len(result.outputs[0]) == num_choices


def test_seqs_in_one_step_are_scored_apart_and_the_draws_stay_the_same(decoder, kv_cache, make_seq) -> None:
    pool, runner = BlockPool(64, BLOCK_SIZE), Runner(decoder, kv_cache)
    groups = [group_of(), group_of((7,)), group_of((8, 8, 8), num_top=0)]
    plain = make_seq((5, 5))
    plain.add_blocks(pool.allocate(1))
    step = Step((plain.schedule(2), *(schedule(each, pool, each.prefix.num_tokens) for each in groups)))

    result = runner.run(step)

    assert sorted(result.scored) == [1, 3]
    assert list(result.scored[1]) == expected()
    assert list(result.scored[3]) == expected((8, 8, 8), num_top=0)
    assert [drawn[0][0].token_id for drawn in result.outputs] == [10, sum(PROMPT), 7, 24]


def test_rows_are_projected_a_tile_at_a_time(decoder, kv_cache, monkeypatch) -> None:
    monkeypatch.setattr(prompt_scores, "_TILE_ROWS", 3)
    pool, group = BlockPool(64, BLOCK_SIZE), group_of()

    result = Runner(decoder, kv_cache).run(Step((schedule(group, pool, 9),)))

    assert list(result.scored[0]) == expected()
    assert max(decoder.num_projected_rows) == 3


def test_a_prompt_that_is_computed_again_tells_only_what_it_had_not_told(decoder, kv_cache) -> None:
    pool, runner, group = BlockPool(64, BLOCK_SIZE), Runner(decoder, kv_cache), group_of(num_choices=2)
    first = take(group, runner.run(Step((schedule(group, pool, 5),))).scored[0])
    for table in group.take_blocks():
        pool.release(table)

    again = take(group, runner.run(Step((schedule(group, pool, 7),))).scored[0])
    rest = take(group, runner.run(Step((schedule(group, pool, 2),))).scored[0])

    assert [*first, *again, *rest] == expected()
    assert (len(first), len(again)) == (5, 2)


def test_a_prompt_that_was_computed_elsewhere_is_not_scored_here(kv_cache) -> None:
    pool, group = BlockPool(64, BLOCK_SIZE), group_of()
    group.land(pool.allocate(3), {0: TokenId(1)}, pool)
    group.take_blocks()

    assert schedule(group, pool, 10).scored is None


def test_a_broken_row_breaks_its_own_seq_alone(decoder, kv_cache, monkeypatch) -> None:
    pool, runner = BlockPool(64, BLOCK_SIZE), Runner(decoder, kv_cache)
    whole = decoder.project

    def project(hidden: torch.Tensor) -> torch.Tensor:
        return torch.where(hidden == 5 + 6, torch.nan, whole(hidden))

    monkeypatch.setattr(decoder, "project", project)
    step = Step((schedule(group_of((5, 6, 7)), pool, 3), schedule(group_of(), pool, 9)))

    result = runner.run(step)

    assert isinstance(result.scored[0], BrokenLogits)
    assert list(result.scored[1]) == expected()


def test_tokens_that_were_skipped_are_a_bug() -> None:
    with pytest.raises(InternalError, match="were not computed"):
        PromptScores(tuple(map(TokenId, PROMPT)), 1).of_chunk(4, 8)
