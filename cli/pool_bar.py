"""A KV pool as a bar of characters, one kind for each state of blocks."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

from tandem.types import PoolCounts

_STATES = (
    ("live", "█", "#", "green"),
    ("receiving", "▓", "+", "cyan"),
    ("reserved", "▒", "-", "blue"),
    ("quarantined", "×", "x", "red"),
    ("free", "·", ".", "dim"),
)
"""Field of PoolCounts, its character, the same for terminals without Unicode, style."""
_NARROWEST, _WIDEST = 8, 60


@dataclass(frozen=True, slots=True)
class PoolBar:
    """As wide as there is room, within bounds; a state that has any blocks gets at least one character."""

    pool: PoolCounts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, _WIDEST)
        bar = Text(no_wrap=True, end="")
        for state, character, ascii_character, style in _STATES[:-1]:
            count = getattr(self.pool, state)
            cells = max(1, round(width * count / self.pool.total)) if count else 0
            bar.append((ascii_character if options.ascii_only else character) * cells, style)
        bar.truncate(width)
        _, free, ascii_free, style = _STATES[-1]
        yield bar.append((ascii_free if options.ascii_only else free) * (width - len(bar)), style)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(_NARROWEST, options.max_width), min(_WIDEST, options.max_width))


class Legend:
    """What the characters of a bar mean."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts = ((f"{short if options.ascii_only else long} {state}", style) for state, long, short, style in _STATES)
        yield Text("  ").join(Text(text, style) for text, style in parts)
