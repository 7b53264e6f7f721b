"""How many tokens per second a worker computes: a moving average over the steps that did."""

from __future__ import annotations

_WEIGHT = 1 / 8
"""Of the newest step."""


class TokenRate:
    """Long steps count by their length: tokens and seconds are averaged apart."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """A step has ended."""
        weight = _WEIGHT if self._tokens else 1.0
        self._tokens += weight * (tokens - self._tokens)
        self._seconds += weight * (seconds - self._seconds)

    @property
    def per_s(self) -> float:
        """0 = nothing was measured."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0
