"""Marks by which a model writes the structure of its answer, searched in text of which only a part is here."""

from __future__ import annotations

import re

SPACES = " \t\r\n"
_MOST_SPACES = 16
"""Templates write at most two of them before a mark; a longer run was meant as text, and only its end is dropped."""


class Marks:
    """Some marks, none of which begins with another; if `spaced`, white space in front belongs to a mark."""

    def __init__(self, *marks: str, spaced: bool = True) -> None:
        self._any = re.compile("|".join(map(re.escape, marks)) or "(?!)")
        self._starts = frozenset(mark[:size] for mark in marks for size in range(1, len(mark)))
        self._longest_start = max(map(len, self._starts), default=0)
        self._most_spaces = _MOST_SPACES if spaced and marks else 0

    def find(self, text: str, start: int) -> tuple[int, int, str] | None:
        """Returns begin and end of the first mark in `text[start:]`, with its white space, and the bare mark."""
        found = self._any.search(text, start)
        return None if found is None else (self._without_spaces(text, start, found.start()), found.end(), found[0])

    def match(self, text: str, start: int) -> tuple[int, str] | None:
        """Returns the end of the mark with which `text[start:]` begins, and the bare mark."""
        most = min(len(text), start + self._most_spaces)
        found = self._any.match(text, next((at for at in range(start, most) if text[at] not in SPACES), most))
        return None if found is None else (found.end(), found[0])

    def held_from(self, text: str, start: int) -> int:
        """Returns where the longest tail of `text[start:]` begins that may still become a mark."""
        sizes = range(min(self._longest_start, len(text) - start), 0, -1)
        size = next((size for size in sizes if text[len(text) - size :] in self._starts), 0)
        return self._without_spaces(text, start, len(text) - size)

    def _without_spaces(self, text: str, start: int, end: int) -> int:
        low = max(start, end - self._most_spaces)
        return low + len(text[low:end].rstrip(SPACES))
