from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import InternalError
from tandem.lifecycle import (
    BLOCK_MOVES,
    REQUEST_MOVES,
    TRANSFER_MOVES,
    BlockState,
    RequestState,
    TransferState,
    advance,
)

TABLES: list[tuple[Mapping[Any, frozenset[Any]], Any, Any]] = [
    (BLOCK_MOVES, BlockState, BlockState.FREE),
    (TRANSFER_MOVES, TransferState, TransferState.OFFERED),
    (REQUEST_MOVES, RequestState, RequestState.QUEUED),
]


def reachable(moves: Mapping[Any, frozenset[Any]], start: Any) -> set[Any]:
    seen, todo = {start}, [start]
    while todo:
        for state in moves[todo.pop()] - seen:
            seen.add(state)
            todo.append(state)
    return seen


@pytest.mark.parametrize(("moves", "states", "start"), TABLES)
def test_every_state_is_in_its_table_and_reachable(moves: Any, states: Any, start: Any) -> None:
    assert set(moves) == set(states)
    assert reachable(moves, start) == set(states)


@pytest.mark.parametrize(("moves", "states", "start"), TABLES)
def test_from_every_state_an_end_can_be_reached(moves: Any, states: Any, start: Any) -> None:
    ends = {state for state in states if not moves[state]} or {BlockState.FREE}
    for state in states:
        assert reachable(moves, state) & ends


@given(st.data())
def test_random_moves_follow_the_table_and_terminal_states_stick(data: st.DataObject) -> None:
    moves, states, state = data.draw(st.sampled_from(TABLES))
    for to in data.draw(st.lists(st.sampled_from(list(states)), max_size=20)):
        if to in moves[state] or (not moves[state] and to == state):
            state = advance(moves, state, to)
            assert state == to
        else:
            with pytest.raises(InternalError):
                advance(moves, state, to)


def test_no_block_goes_from_a_writer_to_the_free_list_except_by_the_pools_own_word() -> None:
    assert BlockState.RESERVED not in BLOCK_MOVES[BlockState.QUARANTINED]
    assert BLOCK_MOVES[BlockState.QUARANTINED] == {BlockState.FREE}
    assert BlockState.LIVE not in BLOCK_MOVES[BlockState.QUARANTINED]
    assert BlockState.LIVE not in BLOCK_MOVES[BlockState.RESERVED], "unverified bytes are never decoded"


def test_a_failed_transfer_never_commits() -> None:
    for state in (TransferState.FAILED, TransferState.QUARANTINED):
        assert TransferState.COMMITTED not in reachable(TRANSFER_MOVES, state)
