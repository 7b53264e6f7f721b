"""An asyncio event loop on a simulated clock: time passes only while nobody has anything to do.

What would be waited for with a real clock happens at once, at the time for which it was scheduled. One thread, no
sockets, no threads: the order of events depends on the program alone.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from tandem.errors import InternalError

T = TypeVar("T")


class _Skipper(selectors.SelectSelector):
    """Instead of waiting, moves the clock on."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Raises InternalError if all wait and nothing is scheduled."""
        if timeout is None:
            raise InternalError("a simulation stands still: everything waits, and nothing is scheduled")
        self.now_s += max(0.0, timeout)
        return []


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Begins at 0 s."""

    def __init__(self) -> None:
        self._skipper = _Skipper()
        super().__init__(self._skipper)

    def time(self) -> float:
        """Simulated seconds."""
        return self._skipper.now_s


class SimulatedClock:
    """A `shell.clock.Clock` that shows the running loop's time."""

    def now_s(self) -> float:
        """Simulated seconds."""
        return asyncio.get_running_loop().time()


def run_simulated(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, on a simulated clock."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(main)
