"""A call at regular intervals on the loop, whether or not anything else happens: deadlines expire by it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Ticker:
    """Ticks between `start` and `stop`. A tick that raises is reported by the loop; the next one comes."""

    def __init__(self, interval_s: float, on_tick: Callable[[], None]) -> None:
        self._interval_s = interval_s
        self._on_tick = on_tick
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """First tick after one interval."""
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._tick)

    def stop(self) -> None:
        """No tick after this. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self.start()
        self._on_tick()
