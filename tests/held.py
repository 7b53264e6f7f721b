"""What this process holds of the system, before and after a test."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

SETTLED_WITHIN = 2000
"""Looks, 10 ms apart."""


def held() -> tuple[int, int, int]:
    """Descriptors, threads and mappings of memory that has a descriptor."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    of_the_loop = sum(thread.name.startswith("asyncio_") for thread in threading.enumerate())  # it resolves names
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")) - of_the_loop, maps.count("memfd:")


@asynccontextmanager
async def nothing_stays() -> AsyncIterator[None]:
    """Fails if more is held afterwards. Less may be: what other tests left behind goes when it is collected."""
    before = held()
    yield
    for _ in range(SETTLED_WITHIN):  # libraries end their threads a moment later
        if all(now <= then for now, then in zip(held(), before, strict=True)):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{held()} is held, {before} was")
