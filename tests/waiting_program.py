"""A child process that only waits, under the command line of a program of Tandem's."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def waiting_program(folder: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A child of this process that only waits, under the command line of `python -m` whatever."""
    (folder / f"{command[0]}.py").write_text("import sys; sys.stdin.read()")
    with subprocess.Popen([sys.executable, "-m", *command], cwd=folder, stdin=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()
