"""How long the next hand-off should take, by those before it: a line through what was measured, newer ones first."""

from __future__ import annotations

_DECAY = 0.95
"""Weight that a measurement has left after the next measurement."""


class HandoffTimes:
    """A line of least squares with exponentially decaying weights; neither its offset nor its slope is negative."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def took(self, num_tokens: int, seconds: float) -> None:
        """KV of so many tokens was handed over."""
        news = (1.0, num_tokens, seconds, num_tokens * num_tokens, num_tokens * seconds)
        old = (self._weight, self._x, self._y, self._xx, self._xy)
        sums = (_DECAY * before + new for before, new in zip(old, news, strict=True))
        self._weight, self._x, self._y, self._xx, self._xy = sums

    def expected_s(self, num_tokens: int) -> float:
        """For so many tokens; 0 as long as nothing was measured."""
        if not self._weight:
            return 0.0
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x**2
        slope = (self._xy / self._weight - mean_x * mean_y) / spread if spread > 1e-9 * mean_x**2 else 0.0
        slope = min(max(0.0, slope), mean_y / mean_x if mean_x else 0.0)
        return mean_y + slope * (num_tokens - mean_x)
