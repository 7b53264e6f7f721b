"""A few threads that do work for many callers, small work first.

Every fourth time the oldest work is done instead: small work cannot hold up large work for ever. Large work has one
thread at most, so that small work has the others. Work that has begun goes on when its caller leaves, and counts until
it is done.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_OLDEST_EVERY = 4

_T = TypeVar("_T")


class Lane:
    """Its queue is single-threaded; only the work itself is done in the threads."""

    def __init__(self, name: str, num_threads: int = 1, large: float = math.inf) -> None:
        """Work of a size beyond `large` is large."""
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_free = num_threads
        self._large = large
        self._large_runs = False
        self._waiting: dict[asyncio.Future[None], int] = {}
        """Size by turn, in the order of arrival."""
        self._num_turns = 0
        self.size = 0
        """Sum over all work that waits or is under way."""

    async def run(self, size: int, work: Callable[[], _T]) -> _T:
        """Returns what `work` returns or raises, once its turn has come."""
        self.size += size
        if self._may_begin(size):
            self._begin(size)
        else:
            await self._turn(size)
        doing = asyncio.get_running_loop().run_in_executor(self._threads, work)
        doing.add_done_callback(lambda _: self._done(size))
        return await asyncio.shield(doing)

    def close(self) -> None:
        """Ends the threads after the work under way; its results are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, size: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = size
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.pop(turn, None)
                self.size -= size
            else:  # the turn came in the same moment
                self._done(size)
            raise

    def _may_begin(self, size: int) -> bool:
        return self._num_free > 0 and not (size > self._large and self._large_runs)

    def _begin(self, size: int) -> None:
        self._num_free -= 1
        self._large_runs = self._large_runs or size > self._large

    def _done(self, size: int) -> None:
        self.size -= size
        self._num_free += 1
        self._large_runs = self._large_runs and size <= self._large
        while ready := [turn for turn, each in self._waiting.items() if self._may_begin(each)]:
            self._num_turns += 1
            is_by_age = self._num_turns % _OLDEST_EVERY == 0
            turn = ready[0] if is_by_age else min(ready, key=self._waiting.__getitem__)
            waited = self._waiting.pop(turn)
            if not turn.cancelled():
                self._begin(waited)
                turn.set_result(None)
