"""What this process asks of its C allocator."""

from __future__ import annotations

import ctypes
import sys

_MALLOC_SETTINGS = (
    (-3, 32 << 20),  # M_MMAP_THRESHOLD, the most that glibc takes; larger chunks are still mapped one by one
    (-1, 1 << 30),  # M_TRIM_THRESHOLD
    (-2, 64 << 20),  # M_TOP_PAD
    (-8, 4),  # M_ARENA_MAX: threads of links come and go, and a new arena for each would keep what it once held
)
"""Parameters of mallopt by their numbers in malloc.h; all but the last are bytes."""


def keep_freed_memory() -> bool:
    """Lets the C allocator of this process keep what is freed from now on; False where it has no such setting.

    What is free already, such as what loading a model needed for a while, goes back to the system.

    By default glibc returns large freed chunks to the system at once, and each step faults them in
    again, page by page, zeroed: a quarter of a decode step on the demo model (bench/LOG.md).
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    mallopt, trim = getattr(libc, "mallopt", None), getattr(libc, "malloc_trim", None)
    if mallopt is None or trim is None:
        return False
    trim(0)
    accepted = [mallopt(parameter, value) == 1 for parameter, value in _MALLOC_SETTINGS]
    return all(accepted)
