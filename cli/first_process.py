"""SIGTERM for a container's first process while it is starting: the kernel ignores it there unless it has a handler.

Only there: SIGTERM ends any other process by default, and a program that imports this package keeps its own handler.
`rpc.process` installs a server's handler in place of this one.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

_FIRST = 1


def heed_sigterm() -> None:
    """Installs a handler that ends this process at once, if it is the first one: it holds nothing yet."""
    if os.getpid() == _FIRST:
        signal.signal(signal.SIGTERM, _end)


def _end(signum: int, frame: FrameType | None) -> None:
    os._exit(128 + signum)
