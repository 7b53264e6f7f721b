"""Whole steps over a decoder that reads every token back from the cache."""

from __future__ import annotations

import math
import random

import pytest

from engine.block_pool import BlockPool
from engine.chunking import plan_chunks
from engine.engine_thread import MAX_FAILURES, EngineThread
from engine.kv_cache import KvCache
from engine.loading import open_engine_executor
from engine.runner import Runner, independent_runs
from engine.sequence import Sequence
from engine.step import (
    BlockCopy,
    BrokenLogits,
    Direction,
    SampledToken,
    ScheduledSeq,
    Step,
    TierMove,
)
from tandem.errors import InternalError
from tandem.types import BlockId, TokenId

VOCAB_SIZE = 97
BLOCK_SIZE = 4
SEQS = (ScheduledSeq((TokenId(1),), 0, (BlockId(0),)),)


def expected_completion(prompt: tuple[int, ...], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sum(tokens) % VOCAB_SIZE)
    return tokens[len(prompt) :]


def run(seqs: list[Sequence], runner: Runner, pool: BlockPool, budget: int) -> None:
    """Steps until every seq has ended: chunks and decode steps mixed under one budget."""
    while waiting := [seq for seq in seqs if not seq.is_finished]:
        chunks = plan_chunks([seq.num_remaining_tokens for seq in waiting], budget, 8)
        scheduled = [(seq, chunk) for seq, chunk in zip(waiting, chunks, strict=True) if chunk]
        for seq, chunk in scheduled:
            seq.add_blocks(pool.allocate(seq.blocks_wanted(chunk, BLOCK_SIZE)))
        result = runner.run(Step(tuple(seq.schedule(chunk) for seq, chunk in scheduled)))
        for (seq, _), draws in zip(scheduled, result.outputs, strict=True):
            for (token,) in draws:
                if seq.append_token(token.token_id):
                    pool.release(seq.take_blocks())


@pytest.mark.parametrize("budget", [1, 3, 8, 64])
def test_any_split_into_chunks_and_any_mix_gives_the_same_tokens(make_seq, decoder, kv_cache, budget: int) -> None:
    pool = BlockPool(kv_cache.num_blocks, BLOCK_SIZE)
    held = pool.allocate(9)  # so that tables are neither dense nor in order
    extra = pool.allocate(3)
    pool.release(held)
    rng = random.Random(budget)
    prompts = [tuple(rng.randrange(VOCAB_SIZE) for _ in range(length)) for length in (1, 3, 4, 5, 17, 30)]
    seqs = [make_seq(prompt, max_tokens=9) for prompt in prompts]
    run(seqs, Runner(decoder, kv_cache), pool, budget)
    for seq, prompt in zip(seqs, prompts, strict=True):
        assert list(seq.output_token_ids) == expected_completion(prompt, 9)
    pool.release(extra)
    pool.assert_idle()


def test_only_the_seqs_that_ask_for_a_token_get_one(make_seq, decoder, kv_cache) -> None:
    pool = BlockPool(kv_cache.num_blocks, BLOCK_SIZE)
    chunked, whole = make_seq((1, 2, 3)), make_seq((4, 5))
    for seq in (chunked, whole):
        seq.add_blocks(pool.allocate(1))
    result = Runner(decoder, kv_cache).run(Step((chunked.schedule(2), whole.schedule(2))))
    assert result.outputs == ((), ((SampledToken(TokenId(9), None),),))
    assert result.seconds > 0


def test_choices_draw_from_the_row_of_the_prompts_last_token(make_seq, decoder, kv_cache) -> None:
    prefix, choices = make_seq((1, 2)), [make_seq((1, 2), index=n, temperature=5.0, seed=n) for n in range(6)]
    prefix.add_blocks((BlockId(0),))
    alone = []
    for each in choices:
        prefix.drawers = (each,)
        alone += Runner(decoder, kv_cache).run(Step((prefix.schedule(2),))).outputs[0]
        prefix.roll_back(2)
        each.roll_back(0, 1)
    prefix.drawers = tuple(choices)
    assert list(Runner(decoder, kv_cache).run(Step((prefix.schedule(2),))).outputs[0]) == alone
    assert len(set(alone)) > 1


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (Step(()), "without seqs"),
        (Step(SEQS, copies=(BlockCopy(BlockId(0), BlockId(64)),)), "beyond the 64"),
        (Step(SEQS, moves=(TierMove(BlockId(0), 0, Direction.OUT),)), "no host tier"),
    ],
)
def test_a_step_that_cannot_be_is_refused_before_it_runs(decoder, kv_cache, step: Step, why: str) -> None:
    with pytest.raises(InternalError, match=why):
        Runner(decoder, kv_cache).prepare(step)


def test_reading_a_slot_that_was_never_written_is_caught(make_seq, decoder, kv_cache: KvCache) -> None:
    seq = make_seq((1, 2, 3))
    seq.add_blocks(BlockPool(4, BLOCK_SIZE).allocate(1))
    seq.advance(2)  # claims KV that nobody computed
    assert Runner(decoder, kv_cache).run(Step((seq.schedule(1),))).outputs == ((BrokenLogits(),),)


async def test_logits_that_break_end_neither_their_batch_nor_the_engine(make_seq, decoder, kv_cache) -> None:
    good, bad = make_seq((1, 2)), make_seq((1, 2), logit_bias={TokenId(5): math.inf})
    good.add_blocks((BlockId(0),))
    bad.add_blocks((BlockId(1),))
    engine = EngineThread(Runner(decoder, kv_cache), open_engine_executor())
    try:
        for _ in range(MAX_FAILURES + 1):
            result = await engine.launch(Step((good.schedule(2), bad.schedule(2))))
            assert result.outputs == (((SampledToken(TokenId(3), None),),), (BrokenLogits(),))
            for seq in (good, bad):
                seq.roll_back(2, 1)
    finally:
        engine.close()


@pytest.mark.parametrize("seed", range(20))
def test_copies_made_in_runs_leave_what_copies_made_one_by_one_leave(seed: int) -> None:
    rng = random.Random(seed)
    copies = [BlockCopy(*map(BlockId, rng.sample(range(7), 2))) for _ in range(rng.randrange(12))]
    one_by_one, in_runs = list(range(7)), list(range(7))
    for copy in copies:
        one_by_one[copy.target] = one_by_one[copy.source]
    for run_ in independent_runs(copies):
        touched = [copy.target for copy in run_]
        assert len(set(touched)) == len(touched)
        assert not {copy.source for copy in run_} & set(touched)
        before = list(in_runs)
        for copy in run_:
            in_runs[copy.target] = before[copy.source]
    assert in_runs == one_by_one


def test_copies_of_different_blocks_are_one_run() -> None:
    copies = [BlockCopy(BlockId(0), BlockId(n)) for n in range(1, 9)]
    assert independent_runs(copies) == [copies]
    assert independent_runs(()) == []


def test_a_block_is_copied_whole_before_either_copy_is_written(make_seq, decoder, kv_cache) -> None:
    runner, pool = Runner(decoder, kv_cache), BlockPool(kv_cache.num_blocks, BLOCK_SIZE)
    first = make_seq((5, 6), max_tokens=4)
    first.add_blocks(pool.allocate(1))
    runner.run(Step((first.schedule(2),)))
    second = make_seq((5, 6), max_tokens=4)
    second.add_blocks(pool.allocate(1))
    second.advance(2)
    first.append_token(TokenId(1))
    second.append_token(TokenId(20))
    copy = BlockCopy(first.block_table[0], second.block_table[0])
    ((one,),), ((other,),) = runner.run(Step((first.schedule(1), second.schedule(1)), copies=(copy,))).outputs
    assert (one.token_id, other.token_id) == (12, 31)
