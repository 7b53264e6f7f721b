"""Waiting on an event loop for work on a thread, which cannot be cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def to_the_end(work: asyncio.Future[T], hurry: Callable[[], None] | None = None) -> T:
    """Returns the result of `work`. A cancelled caller gets CancelledError, but only once the work has ended.

    Its cancellation calls `hurry`, which may make the work end sooner.
    """
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as error:
            cancelled = error
            if hurry is not None:
                hurry()
    if cancelled is not None:
        work.exception()  # seen, so that asyncio does not report it as lost
        raise cancelled
    return work.result()
