"""A process that has imported what workers import, and waits to become the successor of one that ends.

Importing torch takes most of a worker's start, and where it was the only one of its kind, all wait for its successor.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence

from cli.launch import orders, standby_command
from cli.supervisor import open_process


class Standby:
    """One process at most, made by `prepare`; `close` ends it, unless it was taken."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def prepare(self) -> bool:
        """Starts one if there is none. False if one ended by itself: the next one would too."""
        if self._process is None:
            self._process = open_process(standby_command(), stdin=subprocess.PIPE)
        return self._process.poll() is None

    def become(self, command: Sequence[str]) -> subprocess.Popen[bytes] | None:
        """Makes it the child that a `launch_command` would start; None if there is none."""
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return None
        with contextlib.suppress(OSError), process.stdin:
            process.stdin.write(orders(command))
            return process
        _end(process)
        return None

    def close(self) -> None:
        """Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError), process:  # closes its pipes and waits for it
        process.kill()
