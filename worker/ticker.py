"""A call at regular intervals on the loop, whether or not anything else happens: deadlines expire by it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def ticking(interval_s: float, on_tick: Callable[[], None]) -> Iterator[None]:
    """Ticks inside the `with`, first after one interval. A tick that raises is reported by the loop; the next comes."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def tick() -> None:
        nonlocal timer
        timer = loop.call_later(interval_s, tick)
        on_tick()

    timer = loop.call_later(interval_s, tick)
    try:
        yield
    finally:
        timer.cancel()
