"""What is expected of completions, and how many blocks that takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from decode_worker.growth import WINDOW, Forecast, Growth
from engine.block_pool import BlockPool
from engine.group import Group
from tandem.types import GroupSpec, TokenId

MakeSpec = Callable[..., GroupSpec]
BLOCK_SIZE = 4


class Asked:
    """A request as forecasts see it."""

    def __init__(self, pool: BlockPool, spec: GroupSpec, num_blocks: int) -> None:
        self.for_another = False
        self.group = Group(spec)
        if num_blocks:
            first = {choice.index: TokenId(1) for choice in self.group.prefix.drawers}
            self.group.land(pool.allocate(num_blocks), first, pool)


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(99, BLOCK_SIZE)


def after(pool: BlockPool, lengths: Sequence[int]) -> Growth:
    growth = Growth(pool, first_guess_tokens=8)
    for num_tokens in lengths:
        growth.completed(num_tokens)
    return growth


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
        ([99, *[3] * WINDOW], 0, 99, 3),  # the oldest are forgotten
    ],
)
def test_a_completion_becomes_as_long_as_most_of_the_longer_ones(
    pool: BlockPool, make_spec: MakeSpec, lengths: list[int], num_emitted: int, max_tokens: int, expected: int
) -> None:
    group = Group(make_spec(5, max_tokens, emitted=num_emitted))
    assert after(pool, lengths).tokens_left(group.prefix) == expected


def test_a_sequence_that_ends_gives_back_what_it_holds_for_the_growth_of_others(
    pool: BlockPool, make_spec: MakeSpec
) -> None:
    growth = Growth(pool, 99)
    short, long = Asked(pool, make_spec(12, 9), 3), Asked(pool, make_spec(4, 41), 1)
    forecast = growth.forecast([short, long], [])  # type: ignore[list-item]
    # The first tokens are drawn: 8 and 40 are left, and each lacks a block for the first.
    assert [forecast.most_blocks(num_steps) for num_steps in (4, 8, 20, 40)] == [2 + 2, 2 + 4, 2 + 4, 1 + 10 - 3]


def test_a_waiting_sequence_takes_all_its_growth_and_gives_nothing_back(pool: BlockPool, make_spec: MakeSpec) -> None:
    growth = Growth(pool, 99)
    waiting = [Asked(pool, make_spec(8, 16), 0), Asked(pool, make_spec(8, 17), 2)]
    forecast = growth.forecast([], waiting)  # type: ignore[arg-type]
    assert {forecast.most_blocks(num_steps) for num_steps in (1, 10, 1000)} == {(2 + 4) + (1 + 4)}


def test_a_handoff_holds_its_blocks_until_it_has_landed_and_run(pool: BlockPool, make_spec: MakeSpec) -> None:
    growth = Growth(pool, 99)
    incoming, long = Asked(pool, make_spec(16, 8), 0), Asked(pool, make_spec(4, 101), 1)
    alone = growth.forecast([long], [])  # type: ignore[list-item]
    both = growth.forecast([long], [], [incoming], handoff_steps=20)  # type: ignore[list-item]
    assert both.most_blocks(28) == alone.most_blocks(28) + 2, "its prompt's blocks are held already"
    assert both.most_blocks(99) == alone.most_blocks(99) - 4


def test_a_newcomer_needs_room_for_what_all_take_while_it_is_there(pool: BlockPool, make_spec: MakeSpec) -> None:
    growth = Growth(pool, 400)
    stream = Asked(pool, make_spec(4, 401), 1)
    forecast = growth.forecast([stream], [])  # type: ignore[list-item]
    newcomer = Asked(pool, make_spec(12, 8), 0).group
    assert growth.blocks_wanted(newcomer, forecast, 0) == (3 + 2) + (1 + 2)
    assert growth.blocks_wanted(newcomer, forecast, 40) == (3 + 2) + (1 + 12)


def test_the_choices_of_a_group_grow_together_and_end_as_one(pool: BlockPool, make_spec: MakeSpec) -> None:
    growth = Growth(pool, 99)
    group: Any = Asked(pool, make_spec(6, 9, n=3), 2)
    forecast = growth.forecast([group], [])
    # Two of three copy the last block; each grows by two.
    assert forecast.most_blocks(8) == 3 + 3 * 2
    assert group.group.num_held_blocks == 2


def test_without_anybody_nothing_is_taken() -> None:
    assert Forecast(BLOCK_SIZE, 0, []).most_blocks(1000) == 0
