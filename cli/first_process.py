"""SIGTERM for a container's first process while it is starting: the kernel drops it there until somebody takes it.

Only there: any other process ends by it anyhow, and a program that imports this package keeps its own handler.
From `rpc.process` on, a server's own takes its place.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

_FIRST = 1


def heed_sigterm() -> None:
    """Ends at once by it, as any other process would: nothing is held yet."""
    if os.getpid() == _FIRST:
        signal.signal(signal.SIGTERM, _end)


def _end(signum: int, frame: FrameType | None) -> None:
    os._exit(128 + signum)
