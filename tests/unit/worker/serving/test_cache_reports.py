"""What routers are told of a worker's cache."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.prefix_map import PrefixMap
from tandem.v1 import worker_pb2
from worker.serving import cache_reports
from worker.serving.cache_reports import CacheNews, CacheReports


class FakeCache:
    """Holds names of blocks and tells its reports."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.reports = CacheReports(self)

    def hashes(self) -> Sequence[int]:
        return sorted(self.held)

    def store(self, *names: int) -> None:
        self.held.update(names)
        self.reports.stored("", None, names, ())

    def remove(self, *names: int) -> None:
        self.held.difference_update(names)
        self.reports.removed(names)

    def clear(self) -> None:
        self.held.clear()
        self.reports.cleared()


class Router:
    """Takes its news when told to, as its stream would."""

    def __init__(self) -> None:
        self.due = asyncio.Event()
        self.news = CacheNews(self.due.set)
        self.map = PrefixMap()
        self.messages: list[worker_pb2.CacheChanges] = []

    def read(self) -> None:
        self.messages = []
        self.read_one()
        while self.due.is_set():
            self.read_one()

    def read_one(self) -> None:
        self.due.clear()
        if (each := self.news.take()) is not None:
            self.messages.append(each)
            self.map.change(each.stored, each.removed, cleared=each.cleared)

    def knows(self, names: Sequence[int]) -> set[int]:
        return {name for name in names if self.map.num_reported([name])}


@pytest.fixture
def cache() -> FakeCache:
    return FakeCache()


async def test_the_first_word_is_all_that_is_held_even_if_that_is_nothing(cache: FakeCache) -> None:
    first, second = Router(), Router()
    with cache.reports.telling(first.news):
        assert first.due.is_set()
        first.read()
        assert [each.cleared for each in first.messages] == [True]
        assert first.map.tells
        cache.store(1, 2, 3)
        with cache.reports.telling(second.news):
            second.read()
            assert second.knows(range(5)) == {1, 2, 3}


async def test_changes_come_together_a_little_later(cache: FakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_reports, "REPORT_EVERY_S", 0.01)
    router = Router()
    with cache.reports.telling(router.news):
        router.read()
        cache.store(1, 2)
        cache.store(3)
        cache.remove(1)
        assert not router.due.is_set()
        await asyncio.wait_for(router.due.wait(), 10)
        router.read()
        assert len(router.messages) == 1
        assert set(router.messages[0].stored) == {2, 3}
        assert not router.messages[0].removed, "what came and went in between is not said"
    cache.store(4)
    assert not router.due.is_set(), "nobody is told who has left"


async def test_a_message_at_a_time_is_made_of_much_news(cache: FakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_reports, "MAX_HASHES_PER_MESSAGE", 4)
    cache.store(*range(10))
    router = Router()
    with cache.reports.telling(router.news):
        router.read()
        assert [len(each.stored) for each in router.messages] == [4, 4, 2]
        assert [each.cleared for each in router.messages] == [True, False, False]
        assert router.knows(range(12)) == set(range(10))


@given(st.integers(0, 10_000))
async def test_whenever_it_reads_a_router_knows_exactly_what_is_held(seed: int) -> None:
    rng, cache, router = Random(seed), FakeCache(), Router()
    names = range(6)
    cache.store(*rng.sample(names, rng.randrange(6)))
    with pytest.MonkeyPatch.context() as patch, cache.reports.telling(router.news):
        patch.setattr(cache_reports, "MAX_HASHES_PER_MESSAGE", 2)
        for _ in range(40):
            free = sorted(set(names) - cache.held)
            match rng.randrange(9):
                case 0 | 1 | 2 if free:
                    cache.store(rng.choice(free))
                case 3 | 4 if cache.held:
                    cache.remove(rng.choice(sorted(cache.held)))
                case 5 if rng.random() < 0.3:
                    cache.clear()
                case 6:
                    router.read_one()
                case 7 | 8:
                    router.read()
                    assert router.knows(names) == cache.held
        router.read()
        assert router.knows(names) == cache.held


async def test_many_hashes_are_told_in_pieces_and_in_order(cache: FakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_reports, "_PIECE", 3)
    first, late, names = Router(), Router(), range(20)
    with cache.reports.telling(first.news):
        first.read()
        cache.store(*names)
        cache.remove(5, 6)
        with cache.reports.telling(late.news):
            cache.remove(7)
            cache.store(5)
            for router in (first, late):
                await router.due.wait()
            while cache.reports._backlog:  # noqa: ASYNC110
                await asyncio.sleep(0)
            first.read()
            late.read()
            assert first.knows(names) == late.knows(names) == set(names) - {6, 7}

            cache.remove(*names)
            cache.clear()
            cache.store(2)
            while cache.reports._backlog:  # noqa: ASYNC110
                await asyncio.sleep(0)
            first.read()
            late.read()
            assert first.knows(names) == late.knows(names) == {2}
