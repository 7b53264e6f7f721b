"""Waiting for work that a cancelled caller must not leave behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


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
