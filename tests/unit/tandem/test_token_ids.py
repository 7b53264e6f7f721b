from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.token_ids import TokenIds
from tandem.types import TokenId

IDS = st.lists(st.integers(0, 2**32 - 1).map(TokenId), max_size=20).map(tuple)


@given(IDS, IDS, st.integers(-25, 25), st.integers(-25, 25))
def test_they_are_as_the_tuple_of_the_same_tokens(ids, others, start, end) -> None:
    held = TokenIds(ids)

    assert (held == ids, ids == held, hash(held) == hash(ids), len(held), tuple(held)) == (*[True] * 3, len(ids), ids)
    assert held[start:end] == ids[start:end]
    assert [held[at] for at in range(-len(ids), len(ids))] == [*ids, *ids]
    assert held + others == ids + others
    assert (held + others).highest == max(ids + others, default=-1)
    assert (held == TokenIds(others)) == (ids == others) == (held == others)


@pytest.mark.parametrize("num_tokens", [0, 1, 1 << 15, (1 << 16) + 3])
def test_read_in_pieces_they_are_the_same(num_tokens) -> None:
    ids = [number * 7919 % 130_003 for number in range(num_tokens)]

    read = asyncio.run(TokenIds.read(ids))

    assert read == TokenIds(ids)
    assert read.highest == max(ids, default=-1)


def test_a_token_that_does_not_fit_is_refused() -> None:
    with pytest.raises(OverflowError):
        TokenIds([2**32])


async def test_others_get_their_turn_while_a_long_prompt_is_read() -> None:
    reading = asyncio.ensure_future(TokenIds.read(range(1 << 17)))
    num_turns = 0
    while not reading.done():
        num_turns += 1
        await asyncio.sleep(0)

    assert num_turns > 3
