"""A thread of one lane. It runs the lane's work in order, then its last work, and is waited for with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tandem.logger import get_logger

THREAD_ENDS_WITHIN_S = 15.0
"""Longer than any deadline that a lane's own work has."""

T = TypeVar("T")

_log = get_logger(__name__)


class LaneThread:
    """Called on the loop. `end` is due once and does not wait."""

    def __init__(self, name: str, last: Callable[[], None] = lambda: None) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._last = last
        self.ending: asyncio.Future[None] | None = None
        """The last work; once this is set, no other can be started."""

    def start(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Runs `work` after all that was started before."""
        return asyncio.get_running_loop().run_in_executor(self._thread, work)

    def end(self) -> asyncio.Future[None]:
        """Starts the last work. Idempotent."""
        if self.ending is None:
            self.ending = self.start(self._last)
            self._thread.shutdown(wait=False)
        return self.ending

    async def ended(self) -> bool:
        """After `end`: joins the thread. One that hangs longer is logged and left: False.

        Nothing is proven of a thread that was left: what it may still touch is not to be freed.
        """
        ending = self.end()
        await asyncio.wait({ending}, timeout=THREAD_ENDS_WITHIN_S)
        if ending.done():
            self._thread.shutdown()
        else:
            _log.error("kv thread left behind", within_s=THREAD_ENDS_WITHIN_S)
        return ending.done()
