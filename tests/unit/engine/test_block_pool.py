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


@pytest.mark.parametrize("blocks", [(0, 0), (9,), (-1,), (0, 1, 3)])
def test_a_call_that_names_one_bad_block_moves_none(blocks: tuple[int, ...]) -> None:
    """Named twice, unknown or free."""
    pool = BlockPool(4, 16)
    pool.allocate(3)
    with pytest.raises(InternalError):
        pool.release(ids(*blocks))
    assert pool.counts().live == 3


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
