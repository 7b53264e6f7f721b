"""A witness compares every token, of requests that failed too, as far as they came."""

from __future__ import annotations

import pytest

from bench.support.witness import DIFFERS, Question, Witness
from tandem.errors import Reason, Unavailable
from tandem.types import TokenId
from tests.answering_client import AnsweringClient

QUESTION = Question("Once", {}, tuple(map(TokenId, (1, 2, 3))))
LOST = Unavailable("gone", Reason.WORKER_LOST)


@pytest.mark.parametrize(
    ("heard", "error", "is_wrong"),
    [
        ([1, 2, 3], None, False),
        ([1, 2], None, True),
        ([1, 2, 2, 3], None, True),
        ([1, 9, 3], None, True),
        ([1, 2], LOST, False),
        ([1, 9], LOST, True),
        ([1, 2, 3, 4], LOST, True),
    ],
)
async def test_a_request_is_wrong_if_a_token_is_missing_doubled_or_strange(
    heard: list[int], error: Unavailable | None, is_wrong: bool
) -> None:
    seen = await Witness("unused", 1, [QUESTION]).ask(AnsweringClient(heard, error=error), QUESTION)
    assert seen.is_wrong == is_wrong
    assert seen.error == (f"{Reason.WORKER_LOST}: gone" if error else DIFFERS if is_wrong else "")
