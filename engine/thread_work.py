"""Waiting on the control loop for work on a thread, which cannot be cancelled."""

from __future__ import annotations

import asyncio
from typing import TypeVar

T = TypeVar("T")


async def to_the_end(future: asyncio.Future[T]) -> T:
    """The result of work on a thread; a cancelled caller gets CancelledError, but only once the work has ended."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        future.exception()  # seen, so that asyncio does not report it as lost
        raise cancelled
    return future.result()
