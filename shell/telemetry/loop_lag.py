"""How late the event loop is: a timer that notes by how much it was overdue.

Whatever holds the loop up, from a long callback to a starved process, delays every stream;
this shows it whether or not there is traffic.
"""

from __future__ import annotations

import asyncio

from shell.telemetry import metric_names as names
from shell.telemetry.metrics import Metrics

PERIOD_S = 0.25


class LoopLag:
    """Measures inside its `with`, by timers: no task, nothing to await. Enter it in the event loop."""

    def __init__(self, metrics: Metrics, period_s: float = PERIOD_S) -> None:
        self._cells = metrics.histogram(names.LOOP_LAG)
        self._period_s = period_s
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        self._wait(asyncio.get_running_loop())

    def __exit__(self, *exc_info: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        due_s = loop.time() + self._period_s
        self._timer = loop.call_later(self._period_s, self._fire, loop, due_s)

    def _fire(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        self._cells.observe(max(0.0, loop.time() - due_s))
        self._wait(loop)
