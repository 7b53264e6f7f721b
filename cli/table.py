"""Text tables for the terminal. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def printable(text: str) -> str:
    """Names come from other machines: without what would command a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest cell; numbers to the right."""
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    numeric = [bool(rows) and all(isinstance(row[index], int | float) for row in rows) for index in range(len(header))]
    return "\n".join(_line(line, widths, numeric) for line in [list(header), *cells])


def _line(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    aligned = (
        cell.rjust(width) if right else cell.ljust(width)
        for cell, width, right in zip(cells, widths, numeric, strict=True)
    )
    return "  ".join(aligned).rstrip()
