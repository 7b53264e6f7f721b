"""Rows of a tier: one holder each, free only when nobody uses them; against a plain model."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from engine.row_book import RowBook
from tandem.errors import InternalError, Overloaded

NUM_ROWS = 5


class BookMachine(RuleBasedStateMachine):
    held: Bundle[int] = Bundle("held")
    pins: Bundle[int] = Bundle("pins")

    def __init__(self) -> None:
        super().__init__()
        self.book: RowBook = RowBook(NUM_ROWS)
        self.known: dict[int, bool] = {}
        self.pinned: list[int] = []

    @rule(target=held)
    def allocate(self) -> int | object:
        if len(self.known.keys() | set(self.pinned)) == NUM_ROWS:
            with pytest.raises(Overloaded):
                self.book.allocate()
            return multiple()
        row = self.book.allocate()
        assert row not in self.known
        assert row not in self.pinned
        self.known[row] = False
        return row

    @rule(row=consumes(held))
    def free(self, row: int) -> None:
        del self.known[row]
        self.book.free((row,))
        with pytest.raises(InternalError):
            self.book.free((row,))

    @rule(row=held)
    def fill(self, row: int) -> None:
        self.known[row] = True
        self.book.filled((row,))

    @rule(target=pins, row=held)
    def pin(self, row: int) -> int:
        self.pinned.append(row)
        self.book.pin((row,))
        return row

    @rule(row=consumes(pins))
    def unpin(self, row: int) -> None:
        self.pinned.remove(row)
        self.book.unpin((row,))

    @invariant()
    def it_agrees_with_the_model(self) -> None:
        self.book.check(self.known)
        assert self.book.num_free == NUM_ROWS - len(self.known.keys() | set(self.pinned))
        assert {row: self.book.is_ready(row) for row in self.known} == self.known

    @rule(at_most=st.integers(1, NUM_ROWS))
    def count(self, at_most: int) -> None:
        rows = list(self.known)
        wanted = [self.known[row] for row in rows]
        assert self.book.num_ready(rows) == [*wanted, False].index(False)
        idle = [self.known[row] and row not in self.pinned for row in rows[::-1][:at_most]]
        assert self.book.num_idle(rows, at_most) == [*idle, False].index(False)


TestRowBook = BookMachine.TestCase
TestRowBook.settings = settings(max_examples=60, stateful_step_count=30)


def test_rows_that_nobody_counts_on_are_found_missing() -> None:
    book: RowBook = RowBook(3)
    row = book.allocate()
    with pytest.raises(InternalError, match="lost"):
        book.check(())
    with pytest.raises(InternalError, match="two places"):
        book.check((row,), (row,))
