"""Finds stop strings in text that arrives in pieces; pure.

The match that *ends* first wins, and among those that end at the same character the longest:
the only rule whose outcome does not depend on how the text was cut into pieces. Only the
longest tail that may still become a stop string is held back. Knows nothing of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopScan:
    """What one piece of text released, and the stop string it completed, if any."""

    text: str
    matched: str | None = None


class StopStrings:
    """One choice's matcher. `feed` pieces until one matches, or `finish` at the end of the text."""

    def __init__(self, stop: tuple[str, ...], *, include_stop: bool = False) -> None:
        self._stop = stop
        self._include_stop = include_stop
        self._first_chars = frozenset(text[0] for text in stop)
        self._longest_tail = max(map(len, stop), default=1) - 1
        self._held = ""

    def feed(self, piece: str) -> StopScan:
        """Adds text; returns what can be shown now. After a match nothing more may be fed."""
        if not self._stop:
            return StopScan(piece)
        text = self._held + piece
        match = self._first_match(text)
        if match is not None:
            self._held = ""
            start, stop = match
            return StopScan(text[: start + len(stop)] if self._include_stop else text[:start], stop)
        cut = self._held_from(text)
        self._held = text[cut:]
        return StopScan(text[:cut])

    def finish(self) -> str:
        """The text held back, now that nothing follows it."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """(start, stop string) of the match that ends first."""
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = text.find(stop)
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                best = candidate if best is None else min(best, candidate)
        return None if best is None else (best[1], best[2])

    def _held_from(self, text: str) -> int:
        """Where the longest tail begins that is a proper start of a stop string."""
        for cut in range(max(0, len(text) - self._longest_tail), len(text)):
            if text[cut] in self._first_chars:
                tail = text[cut:]
                if any(stop.startswith(tail) for stop in self._stop):
                    return cut
        return len(text)
