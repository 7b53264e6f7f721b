"""Ageing, turns and the forecast of blocks, by example and against a plain model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.block_pool import BlockPool
from engine.group import Group
from tandem.types import TokenId
from tests.asked import BLOCK_SIZE, Asked, asked
from worker.admission import Forecast, Line, is_overdue, note_overtaken, turn_of
from worker.tuning import MAX_OVERTAKES, REMEMBERED, TURN_TOKENS


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(99, BLOCK_SIZE)


# --- turns ---


def test_the_shorter_prompt_goes_first_and_of_equal_ones_the_older() -> None:
    long, short, same = asked(0, 100), asked(1, 10), asked(2, 10)
    prompts = {long: 100, short: 10, same: 10}
    assert sorted(prompts, key=lambda each: turn_of(each, prompts[each])) == [short, same, long]


def test_what_is_left_counts_not_what_there_was() -> None:
    begun, new = asked(0, 100), asked(1, 10)
    assert turn_of(begun, 9) < turn_of(new, 10)


def test_priority_counts_before_length() -> None:
    assert turn_of(asked(1, 100, priority=1), 100) < turn_of(asked(0, 1), 1)


@pytest.mark.parametrize("seed", range(10))
def test_no_prompt_starves_however_many_shorter_ones_come(seed: int) -> None:
    draw = random.Random(seed)
    length, new_length = draw.randint(20, 200), draw.randint(1, 20)
    patient, computed = asked(0, length), 0
    line = {patient: length}
    for number in range(1000, 2000):
        newcomer = asked(number, new_length)
        newcomer.came_after_tokens = computed
        line[newcomer] = new_length
        first = min(line, key=lambda each: turn_of(each, line[each]))
        computed += line.pop(first)
        if patient not in line:
            break
    assert patient not in line
    assert computed <= TURN_TOKENS * length + length + 20


# --- ageing ---


@st.composite
def arrivals(draw: st.DrawFn) -> list[tuple[int, bool]]:
    """Priority of each request, and whether it fits while nobody waits for room."""
    return draw(st.lists(st.tuples(st.integers(-2, 2), st.booleans()), min_size=1, max_size=40))


@given(arrivals(), st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_nobody_is_overtaken_more_often_than_the_bound(crowd: list[tuple[int, bool]], num_waves: int) -> None:
    """Plain model: all pairs of an earlier and a later request, of which the later one went first."""
    line, went, number = Line(lambda each: each.rank), list[int](), 0
    fitting: dict[int, bool] = {}
    for _ in range(num_waves * MAX_OVERTAKES):
        for priority, fits in crowd:
            line.add(asked(number, 1, priority=priority))  # type: ignore[arg-type]
            fitting[number] = fits
            number += 1
        for request in line:
            if fitting[request.rank[1]] or is_overdue(request):
                line.remove(request)
                note_overtaken(line, [request])
                went.append(request.rank[1])
                break
    waiting = [each.rank[1] for each in line]
    for place, each in enumerate([*went, *waiting][:200]):
        assert sum(later > each for later in went[:place]) <= MAX_OVERTAKES


def test_overdue_ones_go_first_in_order_of_arrival() -> None:
    line = Line(lambda each: each.rank)
    urgent, old, older = asked(3, 1, priority=1), asked(2, 1), asked(1, 1, priority=-1)
    for each in (urgent, old, older):
        line.add(each)  # type: ignore[arg-type]
    assert [*line] == [urgent, old, older]
    old.num_overtaken = older.num_overtaken = MAX_OVERTAKES
    assert [*line] == [older, old, urgent]
    line.remove(old)  # type: ignore[arg-type]
    line.remove(old)  # type: ignore[arg-type]
    assert len(line) == 2


def test_only_those_that_came_earlier_are_overtaken_once_by_each() -> None:
    first, second, third = (asked(number, 1) for number in range(3))
    note_overtaken([first, second, third], [asked(4, 1), second])  # type: ignore[list-item]
    assert [each.num_overtaken for each in (first, second, third)] == [2, 1, 1]


# --- the forecast ---


def after(pool: BlockPool, lengths: Sequence[int]) -> Forecast:
    forecast = Forecast(pool, first_guess_tokens=8)
    for num_tokens in lengths:
        forecast.completed(num_tokens)
    return forecast


@pytest.mark.parametrize(
    ("lengths", "num_emitted", "max_tokens", "expected"),
    [
        ([], 0, 99, 8),  # the first guess
        ([], 0, 5, 5),  # its own bound
        ([10, 20, 30, 40], 0, 99, 30),  # of 8 and these, four of five are no longer
        ([10, 20, 30, 40], 10, 99, 30),  # of the three longer ones, all are no longer than 40
        ([10, 20, 30, 40], 35, 99, 5),
        ([10, 20, 30, 40], 40, 99, 40),  # outlived them all
        ([10, 20, 30, 40], 40, 44, 4),
        ([99, *[3] * REMEMBERED], 0, 99, 3),  # the oldest are forgotten
    ],
)
def test_a_completion_becomes_as_long_as_most_of_the_longer_ones(
    pool: BlockPool, lengths: list[int], num_emitted: int, max_tokens: int, expected: int
) -> None:
    group = asked(0, 5, max_tokens=max_tokens, emitted=num_emitted).group
    assert after(pool, lengths).tokens_left(group.prefix) == expected


def landed(pool: BlockPool, num_prompt_tokens: int, max_tokens: int, n: int = 1) -> Asked:
    """A request whose first tokens are drawn: `max_tokens - 1` are left of each choice."""
    each = asked(0, num_prompt_tokens, n=n, max_tokens=max_tokens)
    each.group.land(pool.allocate(-(-num_prompt_tokens // BLOCK_SIZE)), dict.fromkeys(range(n), TokenId(1)), pool)
    return each


def most(forecast: Forecast, running: Sequence[Asked], waiting: Sequence[Asked] = (), within: int | None = None) -> int:
    return forecast.most_blocks(running, waiting, within)  # type: ignore[arg-type]


def test_a_sequence_that_ends_gives_back_what_it_holds_for_the_growth_of_others(pool: BlockPool) -> None:
    forecast = Forecast(pool, 99)
    short, long = landed(pool, 12, 9), landed(pool, 4, 41)
    # 8 and 40 tokens are left, and each lacks a block for the first.
    assert [most(forecast, [short, long], within=steps) for steps in (4, 8, 20)] == [2 + 2, 2 + 4, 2 + 4]
    assert most(forecast, [short, long]) == 1 + 10 - 3


def test_a_waiting_sequence_takes_all_its_growth_and_gives_nothing_back(pool: BlockPool) -> None:
    forecast = Forecast(pool, 99)
    waiting = [asked(0, 8, max_tokens=16), landed(pool, 8, 17)]
    assert most(forecast, [], waiting) == (2 + 4) + (1 + 4)


def test_the_choices_of_a_group_grow_together_and_end_as_one(pool: BlockPool) -> None:
    # Two of three copy the last block; each grows by two.
    assert most(Forecast(pool, 99), [landed(pool, 6, 9, n=3)]) == 3 + 3 * 2


def test_without_anybody_nothing_is_taken(pool: BlockPool) -> None:
    assert most(Forecast(pool), []) == 0


@dataclass
class Plain:
    """A group step by step: what it holds beyond now, `steps` from now."""

    pool: BlockPool
    group: Group
    left: int

    def taken(self, steps: int) -> int:
        if steps > self.left:
            return -self.group.num_returned_blocks
        return self.group.num_missing_blocks(self.pool) - (-steps // BLOCK_SIZE) * self.group.num_seats


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(2, 60), st.integers(1, 3)), max_size=6),
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 60)), max_size=3),
)
@settings(max_examples=300, deadline=None)
def test_the_most_that_is_held_is_that_of_a_count_step_by_step(
    running: list[tuple[int, int, int]], waiting: list[tuple[int, int]]
) -> None:
    pool = BlockPool(999, BLOCK_SIZE)
    forecast = Forecast(pool, 99)
    seated = [landed(pool, *each) for each in running]
    others = [asked(9, num_tokens, max_tokens=max_tokens) for num_tokens, max_tokens in waiting]
    plain = [Plain(pool, each.group, max_tokens - 1) for each, (_, max_tokens, _) in zip(seated, running, strict=True)]
    fixed = sum(forecast.all_blocks(each.group) for each in others)
    steps = range(1, 61) if running else range(1)
    assert most(forecast, seated, others) == max(fixed + sum(each.taken(step) for each in plain) for step in steps)
