"""Pieces of one hand-off: placed ahead, announced in order, none after one that failed."""

from contextlib import asynccontextmanager

import pytest

from tandem.errors import TransferError
from tests.kv_ends import Recorder, paired, push_and_commit


class _WatchedLane:
    """Notes in which order pieces are placed and announced; fails to place the one named."""

    def __init__(self, lane, failing=None):
        self._lane = lane
        self._failing = failing
        self.events = []

    def __getattr__(self, name):
        return getattr(self._lane, name)

    async def place(self, sources, *rest):
        self.events.append(f"place {sources[0]}")
        if sources[0] == self._failing:
            raise TransferError("the mapping is closed")
        return await self._lane.place(sources, *rest)

    def announce(self, sink, write, sources, *rest):
        self.events.append(f"announce {sources[0]}")
        return self._lane.announce(sink, write, sources, *rest)


@asynccontextmanager
async def watched(monkeypatch, failing=None):
    monkeypatch.setattr("kvtransfer.transport.PIECE_BYTES", 1)
    async with paired("shm") as pair:
        listener = Recorder()
        handoff = await pair.begin(listener, (4, 5, 6))
        handoff._lane = lane = _WatchedLane(handoff._lane, failing)
        yield pair, handoff, lane, listener


async def test_the_next_piece_is_placed_before_the_one_at_hand_is_announced(monkeypatch):
    async with watched(monkeypatch) as (pair, handoff, lane, _):
        await push_and_commit(handoff, (1, 2, 3))
        assert lane.events == ["place 1", "place 2", "announce 1", "place 3", "announce 2", "announce 3"]
        assert pair.landed((1, 2, 3), (4, 5, 6))


async def test_a_piece_that_cannot_be_placed_is_not_announced_nor_is_any_after_it(monkeypatch):
    async with watched(monkeypatch, failing=2) as (_, handoff, lane, listener):
        with pytest.raises(TransferError, match="mapping is closed"):
            await handoff.push(0, (1, 2, 3))
        await handoff.abort()
        await listener.until("writer_stopped")
        assert [event for event in lane.events if "announce" in event] == ["announce 1"]
