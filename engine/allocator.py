"""Lets the C allocator keep what it is given back: a step's temporaries are the next step's.

By default glibc returns large freed chunks to the system at once, and each step faults them in
again, page by page, zeroed: a quarter of a decode step on the demo model (bench/LOG.md).
"""

from __future__ import annotations

import ctypes
import sys

_SETTINGS = (
    (-3, 32 << 20),  # M_MMAP_THRESHOLD, the most that glibc takes; larger chunks are still mapped one by one
    (-1, 1 << 30),  # M_TRIM_THRESHOLD
    (-2, 64 << 20),  # M_TOP_PAD
)
"""Parameters of mallopt by their numbers in malloc.h, and values in bytes."""


def keep_freed_memory() -> bool:
    """Sets it for the whole process; False where the C library has no such setting."""
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    accepted = [mallopt(parameter, value) == 1 for parameter, value in _SETTINGS]
    return all(accepted)
