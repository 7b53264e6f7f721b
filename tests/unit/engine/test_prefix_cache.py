"""What a cache finds, keeps, evicts and tells: without tiers."""

from __future__ import annotations

import pytest

from engine.block_pool import BlockPool, PoolExhausted
from engine.prefix_cache import PrefixCache
from tandem.lifecycle import BlockState

SIZE = 4


@pytest.fixture
def cache():
    cache = PrefixCache(BlockPool(8, SIZE))
    yield cache
    cache.check_invariants()


def remember(cache, text, salt=""):
    """Computes `text` in fresh blocks, makes them known, and lets go of them."""
    tokens = tuple(map(ord, text))
    blocks = cache.allocate(-(-len(tokens) // cache.pool.block_size))
    cache.insert(salt, tokens, blocks)
    cache.pool.release(blocks)
    return blocks


def find(cache, text, salt="", from_block=0):
    """What is acquired, released at once."""
    blocks = tuple(cache.acquire(salt, tuple(map(ord, text)), from_block))
    cache.pool.release(blocks)
    return blocks


def test_the_longest_known_prefix_of_full_blocks_is_found_and_one_token_is_left_to_compute(cache):
    blocks = remember(cache, "aaaabbbbccccdd")
    assert cache.pool.num_cached == 3
    assert find(cache, "aaaabbbbccccdd") == blocks[:3]
    assert find(cache, "aaaabbbbccccx") == blocks[:3]
    assert find(cache, "aaaabbbbcccc") == blocks[:2]
    assert find(cache, "aaaabbbxcccc") == blocks[:1]
    assert find(cache, "aaaabbbbcccc", from_block=1) == blocks[1:2]
    assert find(cache, "xaaabbbb") == find(cache, "aaa") == find(cache, "") == ()
    assert cache.match("", tuple(map(ord, "aaaabbbbccccx"))) == 12


def test_a_prompt_that_is_inserted_in_pieces_is_found_whole(cache):
    tokens = tuple(map(ord, "aaaabbbbccccdddd"))
    blocks = cache.allocate(4)
    for end in (3, 6, 12, 12, 16):
        cache.insert("", tokens[:end], blocks)
    cache.pool.release(blocks)
    assert tuple(cache.acquire("", (*tokens, 0))) == blocks
    cache.pool.release(blocks)


def test_the_least_recently_used_goes_first_from_its_end_on(cache):
    old, new = remember(cache, "aaaabbbbcccc"), remember(cache, "ddddeeee")
    find(cache, "aaaax")
    taken = cache.allocate(3 + 1)
    assert find(cache, "ddddeeeex") == new[:1]
    assert find(cache, "aaaabbbbccccx") == old
    taken += cache.allocate(1)
    assert find(cache, "ddddeeeex") == ()
    taken += cache.allocate(2)
    assert find(cache, "aaaabbbbccccx") == old[:1]
    assert cache.counters.evicted_blocks == 4
    cache.pool.release(taken)


def test_what_is_held_stays_and_what_cannot_be_given_evicts_nothing(cache):
    remember(cache, "aaaabbbb")
    (held,) = cache.acquire("", tuple(map(ord, "aaaax")))
    assert cache.num_available == 7
    with pytest.raises(PoolExhausted):
        cache.allocate(8)
    assert len(find(cache, "aaaabbbbx")) == 2
    taken = cache.allocate(7, BlockState.RESERVED)
    assert held not in taken
    assert len(find(cache, "aaaabbbbx")) == 1
    cache.pool.release((*taken, held))


def test_all_that_is_available_can_be_given_even_if_it_lies_above_held_blocks(cache):
    tokens = tuple(map(ord, "aaaabbbbcccc"))
    first, second = cache.allocate(2), cache.allocate(3)
    cache.insert("", tokens[:8], first)
    cache.insert("", tokens, second)  # its last block hangs under two that it does not hold
    cache.pool.release(first)
    assert cache.num_available == 5
    taken = cache.allocate(4)
    assert find(cache, "aaaabbbbccccx") == first[:1]
    taken += cache.allocate(1)
    assert find(cache, "aaaabbbbccccx") == ()
    cache.check_invariants()
    cache.pool.release(taken)
    cache.pool.release(second)
    assert cache.pool.num_free == 8


def test_a_held_leaf_is_not_looked_at_again_and_again(cache):
    held = cache.allocate(1)
    cache.insert("", tuple(map(ord, "hhhh")), held)
    remember(cache, "aaaabbbbcccc")
    taken = cache.allocate(cache.pool.num_free)
    for left in (2, 1, 0):
        taken += cache.allocate(1)
        assert len(find(cache, "aaaabbbbccccx")) == left
    with pytest.raises(PoolExhausted):
        cache.allocate(1)
    cache.pool.release((*taken, *held))
    assert len(find(cache, "hhhhx")) == 1


def test_a_cache_that_is_off_is_the_pool():
    cache = PrefixCache(BlockPool(4, SIZE), enabled=False)
    remember(cache, "aaaabbbb")
    assert find(cache, "aaaabbbbx") == ()
    assert cache.num_available == cache.pool.num_free == 4


@pytest.mark.parametrize("size", [1, 16, 256])
def test_block_sizes(size):
    cache = PrefixCache(BlockPool(600, size))
    tokens = tuple(range(512))
    blocks = cache.allocate(512 // size)
    cache.insert("", tokens, blocks)
    cache.pool.release(blocks)
    assert tuple(cache.acquire("", tokens)) == blocks[:-1]
    assert cache.match("", tokens[:300]) == 299 // size * size
