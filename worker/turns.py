"""Whose prompt is computed next: the shortest first, within a bound on age. Pure; time is counted in tokens.

A worker counts the prompt tokens that it has computed. A prompt's turn is that count when it came, and `PATIENCE` times
what is left of it; the smallest goes first. Once `PATIENCE * n` tokens have been computed since a prompt of n tokens
came, every newcomer's turn is behind its own: long prompts wait for short ones, each in proportion to its own length,
and nothing starves.
"""

from __future__ import annotations

from typing import TypeAlias

from worker.request import Request

PATIENCE = 4
"""Tokens computed since a prompt came, per token of its own, after which newcomers no longer go before it."""

Turn: TypeAlias = tuple[int, int, int]
"""Smaller goes first; no two requests have the same."""


def turn_of(request: Request, num_left: int) -> Turn:
    """Of higher priority first; those of one priority by what is left of the prompt, and by age."""
    negative_priority, number = request.rank
    return negative_priority, request.came_after_tokens + PATIENCE * num_left, number
