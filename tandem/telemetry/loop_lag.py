"""How late the event loop is: a timer that notes by how much it was overdue.

Whatever holds the loop up, from a long callback to a starved process, delays every stream;
this shows it whether or not there is traffic.
"""

from __future__ import annotations

import asyncio

from tandem.telemetry import metric_names as names
from tandem.telemetry.metrics import Metrics

PERIOD_S = 0.25


class LoopLag:
    """Runs from `start` to `stop`, in timers of its own: no task, nothing to await."""

    def __init__(self, metrics: Metrics, period_s: float = PERIOD_S) -> None:
        self._cells = metrics.histogram(names.LOOP_LAG).cells()
        self._period_s = period_s
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Call inside the event loop."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._period_s, self._fire, loop, loop.time() + self._period_s)

    def stop(self) -> None:
        """Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        now_s = loop.time()
        self._cells.observe(max(0.0, now_s - due_s))
        self._timer = loop.call_later(self._period_s, self._fire, loop, now_s + self._period_s)
