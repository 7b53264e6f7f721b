"""Waiting for work that a cancelled caller must not leave behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tandem.logger import get_logger

THREAD_ENDS_WITHIN_S = 15.0
"""Longer than any deadline that a lane's own work has."""

_log = get_logger(__name__)


async def to_its_end(work: asyncio.Future[Any], hurry: Callable[[], None] | None = None) -> None:
    """Returns, or passes the caller's cancellation on, only once `work` is done. Its result is not looked at.

    A caller that is cancelled calls `hurry`, which may make it end sooner.
    """
    cancelled = False
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            cancelled = True
            if hurry is not None:
                hurry()
    if cancelled:
        raise asyncio.CancelledError


async def thread_to_its_end(thread: ThreadPoolExecutor, last: asyncio.Future[Any]) -> bool:
    """Joins a thread whose last work is `last`, even if cancelled. One that hangs longer is logged and left: False.

    Nothing is proven of a thread that was left: what it may still touch is not to be freed.
    """
    try:
        await to_its_end(asyncio.ensure_future(asyncio.wait({last}, timeout=THREAD_ENDS_WITHIN_S)))
    finally:
        if last.done():
            thread.shutdown()
        else:
            _log.error("kv thread left behind", within_s=THREAD_ENDS_WITHIN_S)
    return last.done()
