"""How many tokens per second a worker computes: a moving average over the steps that did."""

from __future__ import annotations

_MEMORY_TOKENS = 4096
_MEMORY_STEPS = 8


class TokenRate:
    """The rate over the last few thousand tokens, eight steps at least: noise of one step hides what few tokens add."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """A step has ended."""
        keeps = 1 - min(tokens / _MEMORY_TOKENS, 1 / _MEMORY_STEPS)
        self._tokens = keeps * self._tokens + tokens
        self._seconds = keeps * self._seconds + seconds

    @property
    def per_s(self) -> float:
        """Tokens per second; 0 = nothing was measured."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0
