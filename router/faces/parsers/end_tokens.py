"""The token that ends an answer, whose text is at the end of the answer's if special tokens are kept."""

from __future__ import annotations

from collections.abc import Collection


class EndTokens:
    """Texts of a model's special tokens that are no marks; the one at the very end of an answer is not part of it."""

    def __init__(self, tokens: Collection[str]) -> None:
        self._tokens = frozenset(tokens)
        self._starts = frozenset(token[:size] for token in tokens for size in range(1, len(token) + 1))
        self._longest = max(map(len, tokens), default=0)

    def held_from(self, text: str) -> int:
        """Returns where the longest tail begins that is such a token or may still become one."""
        sizes = range(min(self._longest, len(text)), 0, -1)
        return len(text) - next((size for size in sizes if text[-size:] in self._starts), 0)

    def without(self, tail: str) -> str:
        """Returns what of the answer's last characters, which `held_from` held, is part of it."""
        return "" if tail in self._tokens else tail
