"""A seq that advances by several tokens in one step, as speculation verifies, and is rolled back to what held."""

from __future__ import annotations

import random

import pytest

from engine.block_pool import BlockPool
from engine.runner import Runner
from engine.sequence import Sequence
from engine.step import BrokenLogits, ScheduledSeq, Step
from tandem.types import TokenId
from tests.drawing import history

BLOCK_SIZE = 4
NUM_DRAFTED = 3


def verify(seq: Sequence, drafted: list[TokenId], runner: Runner, pool: BlockPool) -> int:
    """Draws behind the last token and behind each drafted one; keeps what plain decoding would have drawn."""
    last = seq.schedule(1)
    (spec,) = last.samples
    seq.add_blocks(pool.allocate(seq.blocks_wanted(len(drafted), BLOCK_SIZE)))
    samples = tuple(
        spec._replace(
            output_index=spec.output_index + number,
            history=history(output=(*seq.output_token_ids, *drafted[:number])),
            from_end=len(drafted) - number,
        )
        for number in range(len(drafted) + 1)
    )
    (sampled,) = runner.run(
        Step((ScheduledSeq((*last.token_ids, *drafted), last.context_len, seq.block_table, samples),))
    ).outputs
    num_accepted = 0
    for (token,), guess in zip(sampled, [*drafted, None], strict=True):
        num_accepted += 1
        if seq.append_token(token.token_id) or token.token_id != guess:
            break
    seq.advance(num_accepted - 1)
    return num_accepted


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 4.0, "seed": 2}, {"presence_penalty": 1.5, "temperature": 2.0}]
)
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_verified_drafts_give_the_tokens_of_plain_decoding(make_seq, decoder, kv_cache, sampling, right) -> None:
    runner, rng = Runner(decoder, kv_cache), random.Random(1)
    plain, drafted = (make_seq((3, 1, 4), max_tokens=20, **sampling) for _ in range(2))
    pool = BlockPool(kv_cache.num_blocks, BLOCK_SIZE)
    num_steps = {}
    for seq in (plain, drafted):
        num_steps[seq] = 0
        while not seq.is_finished:
            num_tokens, output = seq.num_remaining_tokens, seq.num_output_tokens
            seq.add_blocks(pool.allocate(seq.blocks_wanted(num_tokens, BLOCK_SIZE)))
            if seq is drafted and 0 < output < 20 - NUM_DRAFTED:
                truth = plain.output_token_ids[output : output + NUM_DRAFTED]
                guesses = [token if rng.random() < right else TokenId((token + 1) % 97) for token in truth]
                verify(seq, guesses, runner, pool)
            else:
                ((sampled,),) = runner.run(Step((seq.schedule(num_tokens),))).outputs
                assert not isinstance(sampled, BrokenLogits)
                seq.append_token(sampled[0].token_id)
            num_steps[seq] += 1
    assert drafted.output_token_ids == plain.output_token_ids
    assert (num_steps[drafted] < num_steps[plain]) == (right > 0)
    for seq in (plain, drafted):
        pool.release(seq.take_blocks())
    pool.assert_idle()


def test_tokens_that_did_not_hold_are_rolled_back_and_their_slots_written_again(make_seq, decoder, kv_cache) -> None:
    runner = Runner(decoder, kv_cache)
    seq, plain = make_seq((3, 1, 4, 1, 5)), make_seq((3, 1, 4, 1, 5))
    for each, block in ((seq, 0), (plain, 4)):
        each.add_blocks(BlockPool(8, BLOCK_SIZE).allocate(8)[block : block + 3])
        (((token,),),) = runner.run(Step((each.schedule(5),))).outputs
        each.append_token(token.token_id)
    runner.run(Step((seq.schedule(1),)))  # drawn, and not kept
    seq.roll_back(3, 1)
    assert (seq.num_computed_tokens, seq.num_remaining_tokens, seq.num_pending_tokens) == (3, 3, 0)
    (((again,),),) = runner.run(Step((seq.schedule(3),))).outputs
    (((expected,),),) = runner.run(Step((plain.schedule(1),))).outputs
    assert again == expected
