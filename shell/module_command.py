"""The command line that runs one of our modules as a child of this process."""

from __future__ import annotations

import sys
from pathlib import Path


def module_command(module: str, *arguments: str) -> list[str]:
    """`python -m MODULE ARG…`, without the working directory on its path, where a user may have a models.py.

    With it only if that is where our own packages lie, as in a clone.
    """
    flag = "-m" if Path.cwd() == Path(__file__).resolve().parent.parent else "-Pm"
    return [sys.executable, flag, module, *arguments]
