"""Markdown that benchmarks write."""

from __future__ import annotations

from collections.abc import Sequence

MISSING = "–"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; cells are text already."""
    lines = [header, tuple("---" for _ in header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def number(value: float | None) -> str:
    """Three digits that count."""
    if value is None:
        return MISSING
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
