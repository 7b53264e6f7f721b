"""What the commands write on stdout, by rich: tables, and text of other machines without its control characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich.console import Console, ConsoleRenderable
from rich.table import Table
from rich.text import Text

from shell.telemetry.logging import printable

_WIDE = 240
"""Columns of an output that is no terminal; wider than any table here."""


def open_console(out: TextIO | None = None) -> Console:
    """`out`, by default stdout, with colours where it is a terminal; what is printed there means what it says."""
    console = Console(file=out, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _WIDE
    return console


def print_whole(console: Console, *parts: ConsoleRenderable | str) -> None:
    """Prints lines as long as they need to be: a terminal wraps them, a program finds one row on one line."""
    console.width = max(console.width, _WIDE)
    console.print(*parts, sep="\n", soft_wrap=True)


def plain(text: str) -> Text:
    """Returns a line that is harmless wherever the text came from."""
    return Text(printable(text))


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """Words to the left, numbers to the right; a cell that rich can draw is left to it."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for index, title in enumerate(header):
        numeric = bool(rows) and all(isinstance(row[index], int | float) for row in rows)
        drawn = any(isinstance(row[index], ConsoleRenderable) for row in rows)
        shown.add_column(title, justify="right" if numeric else "left", no_wrap=not drawn)
    for row in rows:
        shown.add_row(*(cell if isinstance(cell, ConsoleRenderable) else plain(str(cell)) for cell in row))
    return shown
