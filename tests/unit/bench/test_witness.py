from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Unpack

from bench.support.witness import Question, Witness
from tandem.client import GenerateOptions, GenerationUpdate
from tandem.errors import Reason, TandemError, Unavailable
from tandem.types import TokenId

QUESTION = Question("Once", temperature=0.0, seed=0, answer=(TokenId(1), TokenId(2), TokenId(3)))


class Answers:
    """A client whose streams bring these tokens, then this error."""

    def __init__(self, tokens: Sequence[int], error: TandemError | None = None) -> None:
        self._tokens = tokens
        self._error = error

    async def generate(
        self, prompt: str | None = None, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[GenerationUpdate, None]:
        for token in self._tokens:
            yield GenerationUpdate("r", 0, "", (TokenId(token),), (), None, None, None, None)
        if self._error is not None:
            raise self._error


async def errors_of(*clients: Answers) -> list[str]:
    witness = Witness("unused", callers=1, max_tokens=3)
    return [(await witness.ask(client, QUESTION)).error for client in clients]


async def test_the_right_tokens_are_no_error() -> None:
    assert await errors_of(Answers([1, 2, 3])) == [""]


async def test_a_missing_a_doubled_and_a_strange_token_are_errors() -> None:
    seen = await errors_of(Answers([1, 2]), Answers([1, 2, 2, 3]), Answers([1, 9, 3]))

    assert seen == ["tokens differ"] * 3


async def test_a_failed_request_is_told_with_its_reason() -> None:
    (error,) = await errors_of(Answers([1], Unavailable("gone", Reason.WORKER_LOST)))

    assert error == f"{Reason.WORKER_LOST}: gone"
