"""Reports to every router what this worker's prefix cache holds: `CacheChanges`, a little behind and together.

    cache ─stored, removed, cleared─▶ CacheReports ─┬─▶ CacheNews of one router ─▶ its stream's writer
                                                    └─▶ …

A router's news is the difference between what was reported to it and what is held: what was stored and removed again in
between is not said, and a router that reads slowly costs no more memory than the cache has blocks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Protocol, TypeAlias

from engine.block_names import CacheListener
from tandem.types import TokenId
from tandem.v1 import worker_pb2

REPORT_EVERY_S = 0.1
MAX_HASHES_PER_MESSAGE = 8192
"""Hashes of a message: 64 KiB."""
_PIECE = 4096
"""Hashes that are reported at a time: about a millisecond."""


class Cache(Protocol):
    """What is asked of `engine.prefix_cache.PrefixCache`."""

    def hashes(self) -> Sequence[int]:
        """Returns the hashes of all held blocks."""


class CacheNews:
    """What a router has still to learn; the first news says that nothing is held of what this router knew."""

    def __init__(self, on_due: Callable[[], None]) -> None:
        """`on_due` is called when news is to be taken."""
        self.on_due = on_due
        self._cleared = True
        self._first: Iterator[int] = iter(())
        """Held when the router came, and still to be said, before all else."""
        self._held: dict[int, bool] = {}
        """Whether a block is held, for blocks of which the router believes the opposite, or will after `_first`."""

    def begin(self, hashes: Iterable[int]) -> None:
        """All that is held; to be called once, at first."""
        self._first = iter(hashes)

    def stored(self, hashes: Iterable[int]) -> None:
        """Now held."""
        self._differ(hashes, held=True)

    def removed(self, hashes: Iterable[int]) -> None:
        """No longer held."""
        self._differ(hashes, held=False)

    def cleared(self) -> None:
        """Nothing is held from now on."""
        self._cleared = True
        self._first = iter(())
        self._held.clear()

    def take(self) -> worker_pb2.CacheChanges | None:
        """The next message, of bounded size, if there is any; `on_due` is called again if that is not all."""
        cleared, self._cleared = self._cleared, False
        first = list(islice(self._first, MAX_HASHES_PER_MESSAGE))
        names = [] if first else list(islice(self._held, MAX_HASHES_PER_MESSAGE))
        news = [(name, self._held.pop(name)) for name in names]
        if first or self._held:
            self.on_due()
        if not (first or news or cleared):
            return None
        return worker_pb2.CacheChanges(
            stored=first or [name for name, held in news if held],
            removed=[name for name, held in news if not held],
            cleared=cleared,
        )

    def _differ(self, hashes: Iterable[int], *, held: bool) -> None:
        if isinstance(hashes, Collection) and self._held.keys().isdisjoint(hashes):
            self._held.update(dict.fromkeys(hashes, held))
            return
        for name in hashes:
            if self._held.get(name, held) is held:
                self._held[name] = held
            else:
                del self._held[name]  # it is again as the router believes


_Change: TypeAlias = Callable[[CacheNews, Sequence[int]], None]


class CacheReports:
    """A `CacheListener` of the worker's cache, for all routers that are connected. Single-threaded."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._backlog: deque[tuple[tuple[CacheNews, ...], _Change, Sequence[int]]] = deque()
        """Changes that routers have still to learn, in order: routers that came later knew of these changes."""
        self._news: list[CacheNews] = []
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def telling(self, news: CacheNews) -> Iterator[None]:
        """A router is connected inside; its first news is all that is held, and due at once."""
        news.begin(self._cache.hashes())
        self._news.append(news)
        news.on_due()
        try:
            yield
        finally:
            self._news.remove(news)

    # --- from the cache (CacheListener) ---

    def stored(
        self, cache_salt: str, parent_hash: int | None, hashes: Sequence[int], token_ids: Sequence[TokenId]
    ) -> None:
        """See `engine.prefix_cache.CacheListener`."""
        self._tell(CacheNews.stored, hashes)

    def removed(self, hashes: Sequence[int]) -> None:
        """See `engine.prefix_cache.CacheListener`."""
        self._tell(CacheNews.removed, hashes)

    def cleared(self) -> None:
        """See `engine.prefix_cache.CacheListener`."""
        self._tell(lambda news, _: news.cleared())

    def _tell(self, change: _Change, hashes: Sequence[int] = ()) -> None:
        """Reports many hashes in pieces, between which other work gets its turn; later changes wait."""
        if not self._news:
            return
        loop, whom = asyncio.get_running_loop(), tuple(self._news)
        if self._backlog or len(hashes) > _PIECE:
            if not self._backlog:
                loop.call_soon(self._tell_next)
            starts = range(0, max(1, len(hashes)), _PIECE)
            self._backlog.extend((whom, change, hashes[start : start + _PIECE]) for start in starts)
        else:
            for news in whom:
                change(news, hashes)
        self._report_later()

    def _tell_next(self) -> None:
        whom, change, hashes = self._backlog.popleft()
        for news in whom:
            change(news, hashes)
        self._report_later()
        if self._backlog:
            asyncio.get_running_loop().call_soon(self._tell_next)

    def _report_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(REPORT_EVERY_S, self._report)

    def _report(self) -> None:
        self._timer = None
        for news in self._news:
            news.on_due()


class CacheListeners:
    """A `CacheListener` that calls several listeners."""

    def __init__(self, listeners: Iterable[CacheListener]) -> None:
        self._listeners = tuple(listeners)

    def stored(
        self, cache_salt: str, parent_hash: int | None, hashes: Sequence[int], token_ids: Sequence[TokenId]
    ) -> None:
        """See `engine.prefix_cache.CacheListener`."""
        for each in self._listeners:
            each.stored(cache_salt, parent_hash, hashes, token_ids)

    def removed(self, hashes: Sequence[int]) -> None:
        """See `engine.prefix_cache.CacheListener`."""
        for each in self._listeners:
            each.removed(hashes)

    def cleared(self) -> None:
        """See `engine.prefix_cache.CacheListener`."""
        for each in self._listeners:
            each.cleared()
