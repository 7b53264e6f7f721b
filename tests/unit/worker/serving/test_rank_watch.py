"""What a worker learns of its ranks while it computes nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest

from shell.rpc.process import StopSignal
from tandem.errors import InternalError
from worker.serving import rank_watch
from worker.serving.rank_watch import RankWatch

WAIT_S = 30.0


class FakeRanks:
    """Two followers: `end` is the first one's end, `stopped` what each look finds."""

    def __init__(self) -> None:
        (first, self._end), (second, self._other) = os.pipe(), os.pipe()
        self.ends = [first, second]
        self.stopped: list[int | None] = []
        self.num_looks = 0
        self.looked = asyncio.Event()

    def end(self) -> None:
        os.write(self._end, b".")

    def find_stopped(self) -> int | None:
        self.num_looks += 1
        if self.num_looks > 4:
            self.looked.set()
        return self.stopped.pop(0) if self.stopped else None

    def close(self) -> None:
        for each in (*self.ends, self._end, self._other):
            os.close(each)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(rank_watch, "LEAST_TIMEOUT_S", 0.002)
    made = FakeRanks()
    yield made
    made.close()


async def lost_in(ranks: Any) -> None:
    stop = StopSignal()
    with RankWatch(ranks, stop):
        await asyncio.wait_for(stop.wait(), WAIT_S)


async def test_a_rank_that_ends_ends_the_worker_as_a_failure(ranks: Any) -> None:
    ranks.end()
    with pytest.raises(InternalError, match="rank 1 of the model has ended"):
        await lost_in(ranks)


async def test_a_rank_that_is_found_stopped_twice_ends_the_worker(ranks: Any) -> None:
    ranks.stopped = [None, 2, 2]
    with pytest.raises(InternalError, match="rank 2 of the model stands still"):
        await lost_in(ranks)
    assert ranks.num_looks == 3


async def test_ranks_that_were_stopped_for_a_moment_are_no_loss(ranks: Any) -> None:
    ranks.stopped, stop = [1, None, 2, 1], StopSignal()
    with RankWatch(ranks, stop):
        await asyncio.wait_for(ranks.looked.wait(), WAIT_S)
    assert not stop.requested.is_set()


async def test_what_else_ends_the_worker_is_not_hidden(ranks: Any) -> None:
    async def fail_once_lost() -> None:
        stop = StopSignal()
        with RankWatch(ranks, stop):
            await asyncio.wait_for(stop.wait(), WAIT_S)
            raise ValueError("a step failed")

    ranks.end()
    with pytest.raises(ValueError, match="a step failed"):
        await fail_once_lost()
