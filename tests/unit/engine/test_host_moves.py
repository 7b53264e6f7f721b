"""Evicted blocks go to the host tier and come back, by moves that steps carry."""

from __future__ import annotations

import pytest

from engine.block_pool import BlockPool
from engine.host_tier import HostTier
from engine.prefix_cache import PrefixCache
from engine.step import Direction
from tandem.lifecycle import BlockState

SIZE = 4
TOKENS = tuple(map(ord, "aaaabbbbccccx"))


@pytest.fixture
def cache():
    cache = PrefixCache(BlockPool(4, SIZE), tier=HostTier(3, 1))
    blocks = cache.allocate(3)
    cache.insert("", TOKENS, blocks)
    cache.pool.release(blocks)
    yield cache
    cache.check_invariants()


def moves_of_a_step(cache, *, failed=False):
    moves = cache.take_moves()
    cache.step_ended(failed=failed)
    return [(move.direction, move.block, move.row) for move in moves]


def store(cache, num_blocks=4, *, failed=False):
    """Others need blocks, for as long as one step."""
    taken = cache.allocate(num_blocks)
    moves = moves_of_a_step(cache, failed=failed)
    cache.pool.release(taken)
    return moves


def test_evicted_blocks_are_found_in_the_host_tier_and_brought_back_by_the_next_step(cache):
    stored = store(cache)
    assert {direction for direction, *_ in stored} == {Direction.OUT}
    rows = [row for *_, row in stored]
    assert len(set(rows)) == 3
    assert cache.match("", TOKENS) == 12
    blocks = cache.acquire("", TOKENS)
    assert cache.num_loaded(blocks) == 0
    loaded = moves_of_a_step(cache)
    assert [(direction, block) for direction, block, _ in loaded] == [(Direction.IN, block) for block in blocks]
    content = {block: row for _, block, row in stored}
    assert [row for *_, row in loaded] == [content[block] for block in (0, 1, 2)]
    assert cache.num_loaded(blocks) == 3
    assert (cache.counters.host_stored_blocks, cache.counters.host_loaded_blocks) == (3, 3)
    cache.pool.release(blocks)
    assert cache.pool.num_cached == 3


def test_rows_that_no_step_has_filled_are_not_read(cache):
    taken = cache.allocate(4)
    assert cache.match("", TOKENS) == 0
    cache.take_moves()
    assert cache.match("", TOKENS) == 0
    cache.step_ended(failed=True)
    cache.pool.release(taken)
    assert cache.match("", TOKENS) == 0
    blocks = cache.allocate(3)
    cache.insert("", TOKENS, blocks)
    assert cache.match("", TOKENS) == 12
    cache.pool.release(blocks)
    assert len(store(cache)) == 3, "rows with garbage were given back"


def test_what_a_failed_step_should_have_brought_is_brought_by_the_next(cache):
    store(cache)
    blocks = cache.acquire("", TOKENS)
    first = moves_of_a_step(cache, failed=True)
    assert cache.num_loaded(blocks) == 0
    assert moves_of_a_step(cache) == first
    assert cache.num_loaded(blocks) == 3
    assert moves_of_a_step(cache) == []
    cache.pool.release(blocks)


def test_only_as_much_is_loaded_as_there_is_room_for(cache):
    store(cache)
    taken = cache.allocate(3)
    assert cache.match("", TOKENS) == 12
    blocks = cache.acquire("", TOKENS)
    assert len(blocks) == 1
    assert len(moves_of_a_step(cache)) == 1
    cache.pool.release((*taken, *blocks))
    assert cache.match("", TOKENS) == 12


def test_blocks_for_peers_to_write_into_are_never_those_that_a_step_moves_out(cache):
    taken = cache.allocate(4)
    cache.pool.release(taken)
    cache.take_moves()
    assert cache.num_available == 1
    (reserved,) = cache.allocate(1, BlockState.RESERVED)
    assert reserved == 3
    cache.step_ended(failed=False)
    assert cache.num_available == 3
    cache.pool.release(cache.allocate(3, BlockState.RESERVED))
    cache.pool.release((reserved,))


def test_blocks_are_stored_ahead_of_peers_that_need_them():
    cache = PrefixCache(BlockPool(32, SIZE), tier=HostTier(8, 1))
    cache.pool.release(cache.allocate(1, BlockState.RESERVED))
    blocks = cache.allocate(32)
    cache.insert("", tuple(range(128)), blocks)
    cache.pool.release(blocks)
    assert len(moves_of_a_step(cache)) == 2
    cache.pool.release(cache.allocate(2, BlockState.RESERVED))
    assert cache.match("", tuple(range(129))) == 128


def test_the_host_tier_keeps_what_was_used_last():
    cache = PrefixCache(BlockPool(2, SIZE), tier=HostTier(2, 1))
    for text in ("aaaabbbb", "ccccdddd", "eeee"):
        blocks = cache.allocate(len(text) // SIZE)
        cache.insert("", tuple(map(ord, text)), blocks)
        moves_of_a_step(cache)
        cache.pool.release(blocks)
    cache.check_invariants()
    assert cache.match("", tuple(map(ord, "ccccddddx"))) == 8
    assert cache.match("", tuple(map(ord, "aaaabbbbx"))) == 4


def test_what_is_cheaper_to_compute_is_neither_stored_nor_loaded():
    tier = HostTier(4, 1)
    tier.block_s = 1.0
    cache = PrefixCache(BlockPool(4, SIZE), tier=tier)
    blocks = cache.allocate(3)
    cache.insert("", TOKENS, blocks)
    cache.pool.release(blocks)
    store(cache)
    assert cache.match("", TOKENS) == 12
    cache.take_moves()
    cache.step_ended(failed=False, seconds=1.0, num_prompt_tokens=10)
    assert cache.match("", TOKENS) == 0
    cache.take_moves()
    cache.step_ended(failed=False, seconds=1000.0, num_prompt_tokens=10)
    assert cache.match("", TOKENS) == 12


def test_what_is_to_be_loaded_for_nobody_is_available_and_so_not_held(cache):
    store(cache)
    cache.pool.release(cache.acquire("", TOKENS))
    num_available, num_held = cache.num_available, cache.num_held("", TOKENS)
    blocks = cache.acquire("", TOKENS)
    assert cache.num_available == num_available - (len(blocks) - num_held)
    assert cache.num_held("", TOKENS) == len(blocks)
    cache.pool.release(blocks)
