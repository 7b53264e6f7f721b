"""Standard input, output and error of a process that was started without some of them."""

from __future__ import annotations

import os
import sys


def hold_standard_streams() -> None:
    """Puts the null device where standard input, output or error was closed when the process was started.

    Otherwise the first files that are opened get these numbers, and libuv aborts when it is to close one of them.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest that is free
        pass
    os.close(descriptor)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
