"""Lets the C allocator keep what it is given back: a step's temporaries are the next step's.

By default glibc returns large freed chunks to the system at once, and each step faults them in
again, page by page, zeroed: a quarter of a decode step on the demo model (bench/LOG.md).
"""

from __future__ import annotations

import ctypes
import sys

# malloc.h
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3

_KEPT_BYTES = 1 << 30
_TOP_PAD_BYTES = 64 << 20
_MMAP_THRESHOLD_BYTES = 32 << 20
"""The most that glibc takes; larger chunks are still mapped one by one."""


def keep_freed_memory() -> bool:
    """Sets it for the whole process; False where the C library has no such setting."""
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = (
        (_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES),
        (_M_TRIM_THRESHOLD, _KEPT_BYTES),
        (_M_TOP_PAD, _TOP_PAD_BYTES),
    )
    accepted = [mallopt(parameter, value) == 1 for parameter, value in settings]
    return all(accepted)
