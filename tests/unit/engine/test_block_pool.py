"""The pool's single moves, and what it refuses."""

from __future__ import annotations

import time

import pytest

from engine.block_pool import BlockPool, PoolExhausted
from tandem.errors import InternalError, Overloaded
from tandem.lifecycle import BlockState
from tandem.types import BlockId

RESERVED = BlockState.RESERVED


def ids(*numbers: int) -> tuple[BlockId, ...]:
    return tuple(BlockId(number) for number in numbers)


def test_blocks_come_in_order_and_released_blocks_come_back_first() -> None:
    pool = BlockPool(8, 16)
    assert pool.allocate(3) == ids(0, 1, 2)
    assert pool.allocate(2) == ids(3, 4)
    pool.release(ids(0, 1, 2))
    assert pool.allocate(4) == ids(0, 1, 2, 5)


def test_too_large_a_wish_is_refused_as_overload_and_takes_nothing() -> None:
    pool = BlockPool(4, 16)
    with pytest.raises(PoolExhausted, match="5 KV blocks wanted, 4 free of 4") as caught:
        pool.allocate(5)
    assert isinstance(caught.value, Overloaded)
    pool.assert_idle()


def test_nothing_is_a_fine_wish() -> None:
    pool = BlockPool(4, 16)
    assert pool.allocate(0) == ()
    pool.release(())
    pool.assert_idle()


def test_a_block_whose_writer_stopped_unverified_never_becomes_live() -> None:
    pool = BlockPool(2, 16)
    blocks = pool.allocate(1, RESERVED)
    pool.start_receiving(blocks)
    pool.writer_stopped(blocks)
    with pytest.raises(InternalError, match="stopped before they were verified"):
        pool.seal(blocks)


def test_a_block_of_known_content_is_cached_without_a_holder_and_found_again_as_it_was() -> None:
    pool = BlockPool(4, 16)
    blocks = pool.allocate(2)
    pool.keep(blocks)
    pool.release(blocks)
    counts = pool.counts()
    assert (counts.cached, counts.free, counts.live) == (2, 2, 0)
    pool.assert_idle()
    with pytest.raises(PoolExhausted):
        pool.allocate(3)
    assert (pool.num_cached_last(blocks), pool.num_cached_last(())) == (2, 0)
    pool.retain(blocks)
    assert (pool.counts().live, pool.ref_count(blocks[0])) == (2, 1)
    assert pool.generations(blocks).tolist() == [1, 1]
    pool.release(blocks)
    pool.evict(blocks)
    assert pool.allocate(2) == blocks
    assert not pool.is_shared(blocks[0])


@pytest.mark.parametrize(
    ("verb", "state"),
    [
        ("keep", BlockState.FREE),
        ("keep", BlockState.RESERVED),
        ("forget", BlockState.RESERVED),
        ("evict", BlockState.LIVE),
        ("evict", BlockState.FREE),
        ("release", BlockState.FREE),
        ("retain", BlockState.RESERVED),
        ("seal", BlockState.RESERVED),
        ("start_receiving", BlockState.LIVE),
        ("writer_stopped", BlockState.LIVE),
        ("writer_stopped", BlockState.FREE),
    ],
)
def test_a_move_that_the_table_lacks_is_our_bug_and_moves_nothing(verb: str, state: BlockState) -> None:
    pool = BlockPool(4, 16)
    good = pool.allocate(1, RESERVED)
    pool.start_receiving(good)
    bad = ids(3) if state is BlockState.FREE else pool.allocate(1, state)
    before = pool.counts()
    with pytest.raises(InternalError, match=f"{verb} of block {bad[0]}, which is {state}"):
        getattr(pool, verb)(bad)
    assert pool.counts() == before
    pool.check_invariants()


def test_one_bad_block_in_a_call_moves_none_of_them() -> None:
    pool = BlockPool(4, 16)
    blocks = pool.allocate(2)
    with pytest.raises(InternalError):
        pool.release((*blocks, BlockId(3)))
    assert pool.counts().live == 2


@pytest.mark.parametrize("blocks", [(0, 0), (9,), (-1,)])
def test_unknown_or_repeated_blocks_are_refused(blocks: tuple[int, ...]) -> None:
    pool = BlockPool(4, 16)
    pool.allocate(4)
    with pytest.raises(InternalError):
        pool.release(ids(*blocks))
    assert pool.counts().live == 4


def test_an_idle_check_fails_while_a_block_is_held() -> None:
    pool = BlockPool(4, 16)
    pool.allocate(1)
    with pytest.raises(InternalError, match="not idle"):
        pool.assert_idle()


def test_a_hundred_thousand_blocks_come_and_go_in_a_moment() -> None:
    pool = BlockPool(100_000, 16)
    started_s = time.process_time()
    pool.release(pool.allocate(100_000))
    assert time.process_time() - started_s < 1.0
