"""A process's figures over the last half hour, for whoever opens its page: a ring of samples, taken by a timer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping

PERIOD_S = 10.0
NUM_SAMPLES = 180


class History:
    """Samples inside its `with`, the first at once. Enter it in the event loop."""

    def __init__(self, read: Callable[[], Mapping[str, float]], period_s: float = PERIOD_S) -> None:
        """`read` tells the figures now, by name; it must neither raise nor take long."""
        self._read = read
        self._period_s = period_s
        self._samples: deque[Mapping[str, float]] = deque(maxlen=NUM_SAMPLES)
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        self._sample(asyncio.get_running_loop())

    def __exit__(self, *exc_info: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def report(self) -> object:
        """Returns the values of each figure, oldest first; None where a sample lacks the figure."""
        names = dict.fromkeys(name for sample in self._samples for name in sample)
        series = {name: [sample.get(name) for sample in self._samples] for name in names}
        return {"period_s": self._period_s, "most": NUM_SAMPLES, "series": series}

    def _sample(self, loop: asyncio.AbstractEventLoop) -> None:
        self._samples.append(self._read())
        self._timer = loop.call_later(self._period_s, self._sample, loop)
