"""A client without a server: every call says the same, then ends, fails or hangs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Unpack

from tandem.client import Choice, Completion, GenerateOptions, GenerationUpdate, Timings, Usage
from tandem.errors import TandemError
from tandem.types import FinishReason, TokenId


class AnsweringClient:
    """`choices` are the tokens of each; text is one letter per token."""

    def __init__(self, *choices: Sequence[int], error: TandemError | None = None, hangs: bool = False) -> None:
        self._choices = choices
        self._error = error
        self._hangs = hangs

    async def generate(
        self, prompt: str | None = None, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[GenerationUpdate, None]:
        """Token by token, the choices in turn; a reason to finish only where all went well."""
        longest = max(map(len, self._choices))
        for place in range(longest):
            for index, tokens in enumerate(self._choices):
                if place < len(tokens):
                    yield self._update(index, place)
        await self._end()

    async def complete(
        self, prompt: str | None = None, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """All at once."""
        await self._end()
        choices = tuple(
            Choice(index, text_of(tokens), tuple(map(TokenId, tokens)), (), FinishReason.LENGTH, None)
            for index, tokens in enumerate(self._choices)
        )
        return Completion("r", choices, Usage(0, 0, 0), Timings(0, 0, 0, 0, 0, 0))

    async def _end(self) -> None:
        if self._hangs:
            await asyncio.Event().wait()
        if self._error is not None:
            raise self._error

    def _update(self, index: int, place: int) -> GenerationUpdate:
        tokens = self._choices[index]
        is_last = place == len(tokens) - 1 and self._error is None and not self._hangs
        reason = FinishReason.LENGTH if is_last else None
        token = tokens[place]
        return GenerationUpdate("r", index, text_of([token]), (TokenId(token),), (), reason, None, None, None)


def text_of(tokens: Sequence[int]) -> str:
    """One letter per token."""
    return "".join(chr(ord("a") + token) for token in tokens)
