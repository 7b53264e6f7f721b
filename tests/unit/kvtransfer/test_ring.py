"""Rows that are set aside: first come, first served, none twice, none lost; against a plain model."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvtransfer.pool import MAX_SLICES, MIN_ROWS, Pool
from kvtransfer.ring import Loan, Ring, give_up
from tandem.errors import InternalError
from tests.transports import PRINTS, StagedPool


@dataclass(eq=False)
class Wanted:
    at_most: int
    future: asyncio.Future[Loan]
    given_up: bool = False


@dataclass
class Model:
    """What is free by count alone, and who waits."""

    num_free: int
    line: list[Wanted] = field(default_factory=list)

    def serve(self) -> None:
        self.line = [each for each in self.line if not each.given_up]
        while self.line and self.num_free:
            each = self.line.pop(0)
            assert each.future.done()
            assert each.future.result().num_blocks == min(each.at_most, self.num_free)
            self.num_free -= each.future.result().num_blocks
        assert not any(each.future.done() for each in self.line)


class RingMachine(RuleBasedStateMachine):
    """Takes, gives back and gives up in any order."""

    NUM_ROWS = 10
    wants: Bundle[Wanted] = Bundle("wants")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.rows = Ring(range(100, 100 + self.NUM_ROWS))
        self.model = Model(self.NUM_ROWS)
        self.all: list[Wanted] = []

    def teardown(self) -> None:
        for each in self.all:
            if each.future.done():
                self.leave(each)
        for each in self.all:  # whoever waited has been served by now
            give_up(each.future)
        assert self.rows.num_free == self.NUM_ROWS
        self.loop.close()

    def leave(self, wanted: Wanted) -> None:
        give_up(wanted.future)
        give_up(wanted.future)

    @rule(target=wants, at_most=st.integers(1, 12))
    def take(self, at_most: int) -> Wanted:
        async def taken() -> asyncio.Future[Loan]:
            return self.rows.take(at_most)

        wanted = Wanted(min(at_most, self.NUM_ROWS // 4), self.loop.run_until_complete(taken()))
        self.model.line.append(wanted)
        self.model.serve()
        self.all.append(wanted)
        return wanted

    @rule(wanted=consumes(wants))
    def give_back_or_give_up(self, wanted: Wanted) -> None:
        if wanted.future.done():
            self.model.num_free += wanted.future.result().num_blocks
        wanted.given_up = True
        self.leave(wanted)
        self.model.serve()

    @invariant()
    def no_row_is_in_two_hands_or_lost(self) -> None:
        held = [
            row
            for each in self.all
            if each.future.done() and not each.future.cancelled() and not each.given_up
            for row in each.future.result().rows
        ]
        assert len(set(held)) == len(held)
        assert set(held) <= set(range(100, 100 + self.NUM_ROWS))
        assert self.rows.num_free == self.model.num_free == self.NUM_ROWS - len(held)


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=60, stateful_step_count=30)


async def test_where_blocks_need_no_row_a_loan_is_there_at_once_for_all_of_them() -> None:
    loan = Ring().take(7).result()
    assert (loan.num_blocks, loan.rows_for((4, 2))) == (7, (4, 2))
    loan.release()


async def test_a_cancelled_waiter_leaves_the_line_and_keeps_nothing() -> None:
    rows = Ring(range(1))
    held = await rows.taken(1)
    waiting = asyncio.create_task(rows.taken(1))
    next_one = asyncio.create_task(rows.taken(1))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    held.release()
    (await next_one).release()
    granted = asyncio.create_task(rows.taken(1))
    granted.cancel()  # before it ran: nothing was taken
    await asyncio.wait({granted})
    assert rows.num_free == 1


async def test_a_waiter_that_is_cancelled_after_it_was_served_gives_back() -> None:
    rows = Ring(range(1))
    held = await rows.taken(1)
    waiting = asyncio.create_task(rows.taken(1))
    await asyncio.sleep(0)
    held.release()  # served, but its task has not run since
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    assert rows.num_free == 1


def make_staged(num_rows: int) -> Pool:
    return Pool(StagedPool(ring_rows=num_rows).memory, PRINTS)


@pytest.mark.parametrize("num_rows", [MIN_ROWS, 7, 16, 50, 4096])
async def test_the_parts_of_a_staged_pools_rows_share_none(num_rows: int) -> None:
    pool = make_staged(num_rows)
    slices = [lent for _ in range(MAX_SLICES + 1) if (lent := pool.lend_slice()) is not None]
    assert 1 <= len(slices) <= MAX_SLICES
    assert pool.lend_slice() is None
    others = [await part.taken(1) for part in (pool.arriving, pool.leaving) for _ in range(part.num_free)]
    rows = [row for group in (*slices, *(loan.rows for loan in others)) for row in group]
    assert len(set(rows)) == len(rows)
    assert set(rows) <= set(range(num_rows))
    pool.return_slice(slices[0])
    assert pool.lend_slice() == slices[0]
    pool.close()


def test_too_few_rows_to_share_are_refused() -> None:
    with pytest.raises(InternalError, match="3 rows"):
        make_staged(3)
