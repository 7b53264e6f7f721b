"""The state tables of blocks, transfers and requests, and the one function that moves them.

    block     FREE → RESERVED → RECEIVING → LIVE → FREE
                        │           └→ QUARANTINED → FREE     request gone, writer not proven stopped
                        └→ FREE                                released before the first byte
              FREE → LIVE                                      computed here, or loaded from a tier
              LIVE → CACHED → LIVE | FREE                      nobody's, content known; held again, or evicted

    transfer  OFFERED → RECEIVING → COMMITTED                  decode worker's view of one ticket
                 │          ├→ FAILED                          bad bytes, expiry, peer lost
                 │          └→ QUARANTINED → FAILED            released under a live writer
                 └→ FAILED

    request   QUEUED → PLACED → PREFILLING → DECODING → FINISHED      router's view
                 └────────┴─────────┴────────────┴────→ FAILED | CANCELLED
              (PREFILLING | DECODING → PLACED when it is replayed on another pair)

Terminal states are sticky: moving a terminal state to itself is a no-op, so that a late
message changes nothing; any other illegal move is our own bug and raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from tandem.errors import InternalError
from tandem.str_enum import StrEnum


class BlockState(StrEnum):
    """States of a block between two allocations."""

    FREE = "free"
    RESERVED = "reserved"
    RECEIVING = "receiving"
    LIVE = "live"
    CACHED = "cached"
    QUARANTINED = "quarantined"


class TransferState(StrEnum):
    """States of a hand-off, at its receiver."""

    OFFERED = "offered"
    RECEIVING = "receiving"
    COMMITTED = "committed"
    QUARANTINED = "quarantined"
    FAILED = "failed"


class RequestState(StrEnum):
    """States of a request, at its router."""

    QUEUED = "queued"
    PLACED = "placed"
    """In the line of the worker that is to compute the prompt."""
    PREFILLING = "prefilling"
    DECODING = "decoding"
    """The prompt is computed; the hand-off may still wait or run."""
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


_B, _T, _R = BlockState, TransferState, RequestState
_ENDED = frozenset({_R.FAILED, _R.CANCELLED})

BLOCK_MOVES: Mapping[BlockState, frozenset[BlockState]] = {
    _B.FREE: frozenset({_B.RESERVED, _B.LIVE}),
    _B.RESERVED: frozenset({_B.RECEIVING, _B.FREE}),
    _B.RECEIVING: frozenset({_B.LIVE, _B.QUARANTINED, _B.FREE}),
    _B.LIVE: frozenset({_B.CACHED, _B.FREE}),
    _B.CACHED: frozenset({_B.LIVE, _B.FREE}),
    _B.QUARANTINED: frozenset({_B.FREE}),
}
TRANSFER_MOVES: Mapping[TransferState, frozenset[TransferState]] = {
    _T.OFFERED: frozenset({_T.RECEIVING, _T.FAILED}),
    _T.RECEIVING: frozenset({_T.COMMITTED, _T.QUARANTINED, _T.FAILED}),
    _T.QUARANTINED: frozenset({_T.FAILED}),
    _T.COMMITTED: frozenset(),
    _T.FAILED: frozenset(),
}
REQUEST_MOVES: Mapping[RequestState, frozenset[RequestState]] = {
    _R.QUEUED: frozenset({_R.PLACED}) | _ENDED,
    _R.PLACED: frozenset({_R.PREFILLING, _R.PLACED}) | _ENDED,
    _R.PREFILLING: frozenset({_R.DECODING, _R.FINISHED, _R.PLACED}) | _ENDED,
    _R.DECODING: frozenset({_R.FINISHED, _R.PLACED}) | _ENDED,
    _R.FINISHED: frozenset(),
    _R.FAILED: frozenset(),
    _R.CANCELLED: frozenset(),
}

S = TypeVar("S", BlockState, TransferState, RequestState)


def advance(moves: Mapping[S, frozenset[S]], state: S, to: S) -> S:
    """Returns `to` if the table allows the move; a terminal state stays itself.

    Raises InternalError on a move that the table does not have.
    """
    allowed = moves[state]
    if to in allowed:
        return to
    if not allowed and to == state:
        return state
    raise InternalError(f"illegal move {type(state).__name__} {state} -> {to}")
