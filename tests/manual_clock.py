"""A clock that tests move by hand."""

from __future__ import annotations


class ManualClock:
    """A clock that stands still until it is moved."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        """Seconds as set."""
        return self._now_s

    def advance_s(self, seconds: float) -> None:
        """Moves the clock forward."""
        self._now_s += seconds
