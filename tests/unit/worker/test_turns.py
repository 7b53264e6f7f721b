"""Whose prompt is computed next."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.asked import Asked, asked
from worker.turns import PATIENCE, turn_of


def newcomers(num_tokens: int) -> Iterator[Asked]:
    for number in range(1000, 2000):
        yield asked(number, num_tokens)


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
def test_nothing_starves_however_many_shorter_prompts_come(seed: int) -> None:
    draw = random.Random(seed)
    length = draw.randint(20, 200)
    patient, computed = asked(0, length), 0
    line = {patient: length}
    for newcomer in newcomers(draw.randint(1, 20)):
        newcomer.came_after_tokens = computed
        line[newcomer] = len(newcomer.group.prefix.token_ids)
        first = min(line, key=lambda each: turn_of(each, line[each]))
        computed += line.pop(first)
        if patient not in line:
            break
    assert patient not in line
    assert computed <= PATIENCE * length + length + 20
