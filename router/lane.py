"""One thread that does work for many callers, small work first.

Every fourth time the oldest is done instead: small work cannot hold up large work for ever. Work that has begun goes on
when its caller leaves, and counts until it is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_OLDEST_EVERY = 4

_T = TypeVar("_T")


class Lane:
    """Its queue is single-threaded; only the work itself is done in the thread."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._waiting: dict[asyncio.Future[None], int] = {}
        """Size by turn, in the order of arrival."""
        self._busy = False
        self._num_turns = 0
        self.size = 0
        """Of all work that waits or is under way."""

    async def run(self, size: int, work: Callable[[], _T]) -> _T:
        """What `work` returns or raises, once its turn has come."""
        self.size += size
        if self._busy:
            await self._turn(size)
        self._busy = True
        doing = asyncio.get_running_loop().run_in_executor(self._thread, work)
        doing.add_done_callback(lambda _: self._done(size))
        return await asyncio.shield(doing)

    def close(self) -> None:
        """Ends the thread after the work under way; its result is dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, size: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = size
        try:
            await turn
        except asyncio.CancelledError:
            self.size -= size
            # The turn may have come in the same moment; then it must be passed on.
            if self._waiting.pop(turn, None) is None:
                self._pass_on()
            raise

    def _done(self, size: int) -> None:
        self.size -= size
        self._pass_on()

    def _pass_on(self) -> None:
        self._busy = bool(self._waiting)
        if not self._waiting:
            return
        self._num_turns += 1
        by_age = self._num_turns % _OLDEST_EVERY == 0
        turn = next(iter(self._waiting)) if by_age else min(self._waiting, key=self._waiting.__getitem__)
        del self._waiting[turn]
        if turn.cancelled():  # its waiter has yet to hear, and passes on
            return
        turn.set_result(None)
