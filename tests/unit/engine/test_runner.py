"""Whole steps over a decoder that reads every token back from the cache."""

from __future__ import annotations

import math
import random

import pytest

from engine.block_pool import BlockPool
from engine.chunking import plan_chunks
from engine.engine_thread import MAX_FAILURES, EngineThread
from engine.kv_cache import KvCache
from engine.runner import Runner
from engine.sequence import Sequence
from engine.step import BrokenLogits, SampledToken
from tandem.types import TokenId

VOCAB_SIZE = 97
BLOCK_SIZE = 4


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
        sampled = runner.step([seq.scheduled(chunk) for seq, chunk in scheduled])
        for (seq, chunk), token in zip(scheduled, sampled, strict=True):
            pool.set_filled(seq.block_table, seq.num_computed_tokens + chunk, from_token=seq.num_computed_tokens)
            seq.advance(chunk)
            if token is not None and seq.append_token(token.token_id):
                pool.release(seq.take_blocks())


@pytest.mark.parametrize("budget", [1, 3, 8, 64])
def test_any_split_into_chunks_and_any_mix_gives_the_same_tokens(make_spec, decoder, kv_cache, budget: int) -> None:
    pool = BlockPool(kv_cache.num_blocks, BLOCK_SIZE)
    held = pool.allocate(9)  # so that tables are neither dense nor in order
    extra = pool.allocate(3)
    pool.release(held)
    rng = random.Random(budget)
    prompts = [tuple(rng.randrange(VOCAB_SIZE) for _ in range(length)) for length in (1, 3, 4, 5, 17, 30)]
    seqs = [Sequence(make_spec(prompt, max_tokens=9)) for prompt in prompts]
    run(seqs, Runner(decoder, kv_cache), pool, budget)
    for seq, prompt in zip(seqs, prompts, strict=True):
        assert list(seq.token_ids)[len(prompt) :] == expected_completion(prompt, 9)
    pool.release(extra)
    pool.assert_idle()


def test_a_preempted_seq_ends_with_the_same_tokens(make_spec, decoder, kv_cache) -> None:
    pool = BlockPool(kv_cache.num_blocks, BLOCK_SIZE)
    seq = Sequence(make_spec((3, 1, 4, 1, 5), max_tokens=8))
    runner = Runner(decoder, kv_cache)
    seq.add_blocks(pool.allocate(2))
    (token,) = runner.step([seq.scheduled(5)])
    assert token is not None
    seq.advance(5)
    seq.append_token(token.token_id)
    pool.release(seq.take_blocks())
    kv_cache.fill_poison()
    run([seq], runner, pool, budget=4)
    assert list(seq.token_ids)[5:] == expected_completion((3, 1, 4, 1, 5), 8)
    pool.assert_idle()


def test_a_seq_resumed_elsewhere_continues_with_the_same_tokens(make_spec, decoder, kv_cache) -> None:
    completion = expected_completion((2, 7), 6)
    resumed = Sequence(make_spec((2, 7, *completion[:3]), num_prompt_tokens=2, max_tokens=6))
    run([resumed], Runner(decoder, kv_cache), BlockPool(kv_cache.num_blocks, BLOCK_SIZE), budget=64)
    assert list(resumed.token_ids)[2:] == completion


def test_only_the_seqs_that_ask_for_a_token_get_one(make_spec, decoder, kv_cache) -> None:
    pool = BlockPool(kv_cache.num_blocks, BLOCK_SIZE)
    chunked, whole = Sequence(make_spec((1, 2, 3))), Sequence(make_spec((4, 5)))
    for seq in (chunked, whole):
        seq.add_blocks(pool.allocate(1))
    tokens = Runner(decoder, kv_cache).step([chunked.scheduled(2), whole.scheduled(2)])
    assert tokens[0] is None
    assert tokens[1] is not None
    assert tokens[1].token_id == TokenId(9)


def test_no_seqs_are_no_step(decoder, kv_cache) -> None:
    assert Runner(decoder, kv_cache).step([]) == []


def test_reading_a_slot_that_was_never_written_is_caught(make_spec, decoder, kv_cache: KvCache) -> None:
    seq = Sequence(make_spec((1, 2, 3)))
    seq.add_blocks(BlockPool(4, BLOCK_SIZE).allocate(1))
    seq.advance(2)  # claims KV that nobody computed
    assert Runner(decoder, kv_cache).step([seq.scheduled(1)]) == [BrokenLogits()]


async def test_logits_that_break_end_neither_their_batch_nor_the_engine(make_spec, decoder, kv_cache) -> None:
    good, bad = Sequence(make_spec((1, 2))), Sequence(make_spec((1, 2), logit_bias={TokenId(5): math.inf}))
    good.add_blocks((0,))
    bad.add_blocks((1,))
    engine = EngineThread(Runner(decoder, kv_cache))
    try:
        for _ in range(MAX_FAILURES + 1):
            sampled = await engine.step([good.scheduled(2), bad.scheduled(2)])
            assert sampled == [SampledToken(TokenId(3), None), BrokenLogits()]
    finally:
        engine.close()
