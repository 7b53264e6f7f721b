"""Where frames appear: in place on a terminal, one after the other anywhere else."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from typing import Protocol, TextIO

_ENTER = "\x1b[?1049h\x1b[?25l"
"""The alternate screen, no cursor."""
_LEAVE = "\x1b[?25h\x1b[?1049l"
_HOME = "\x1b[H"
_CLEAR_LINE = "\x1b[K"
_CLEAR_BELOW = "\x1b[J"


class Screen(Protocol):
    """Shows frames."""

    def size(self) -> tuple[int, int | None]:
        """Columns, and lines where they are limited."""
        ...

    def show(self, lines: Sequence[str]) -> None:
        """Puts one frame where the last one was, or after it."""
        ...


class TerminalScreen:
    """Draws over the last frame; nothing is left of it afterwards."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def size(self) -> tuple[int, int | None]:
        """As the terminal is now."""
        columns, lines = shutil.get_terminal_size()
        return columns, lines

    def show(self, lines: Sequence[str]) -> None:
        """One write, so that it does not flicker."""
        self._out.write(_HOME + "\r\n".join(f"{line}{_CLEAR_LINE}" for line in lines) + _CLEAR_BELOW)
        self._out.flush()


class PlainScreen:
    """Prints each frame and an empty line."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def size(self) -> tuple[int, int | None]:
        """Whoever reads it may scroll."""
        return 160, None

    def show(self, lines: Sequence[str]) -> None:
        """After the last one."""
        self._out.write("\n".join([*lines, "", ""]))
        self._out.flush()


@contextlib.contextmanager
def open_screen(out: TextIO) -> Iterator[Screen]:
    """The kind that fits; a terminal gets back what it showed before."""
    if not out.isatty():
        yield PlainScreen(out)
        return
    out.write(_ENTER)
    try:
        yield TerminalScreen(out)
    finally:
        out.write(_LEAVE)
        out.flush()
