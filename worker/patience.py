"""How long a standstill may last before somebody is given up for the others. Pure."""

from __future__ import annotations


class Patience:
    """Of one cause, looked at at intervals."""

    def __init__(self, for_s: float) -> None:
        self._for_s = for_s
        self._since_s: float | None = None

    def is_over(self, now_s: float, *, stands_still: bool) -> bool:
        """Whether every look has found a standstill for so long; then it begins anew."""
        if not stands_still:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s
        elif now_s - self._since_s >= self._for_s:
            self._since_s = None
            return True
        return False
