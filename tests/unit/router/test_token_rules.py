"""Scores: every output of a beam search has one, and no other output has."""

from __future__ import annotations

import math

import pytest

from router.choice_stream import TokenRules
from tandem.errors import InvalidOutput
from tandem.types import FinishReason, SamplingParams, TokenDelta, TokenId

TOKENS = (TokenId(1), TokenId(2))


def rules(beam_width: int) -> TokenRules:
    return TokenRules(SamplingParams(max_tokens=2, beam_width=beam_width), 10)


@pytest.mark.parametrize(
    ("beam_width", "score", "is_true"),
    [(2, -1.5, True), (2, 0.0, True), (0, None, True), (2, None, False), (0, -1.5, False), (0, 0.0, False)],
)
def test_a_score_comes_where_one_is_due(beam_width: int, score: float | None, is_true: bool) -> None:
    delta = TokenDelta(0, TOKENS, (), FinishReason.LENGTH, score=score)
    if is_true:
        rules(beam_width).check(delta)
        return
    with pytest.raises(InvalidOutput, match="score"):
        rules(beam_width).check(delta)


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_a_score_is_finite(score: float) -> None:
    with pytest.raises(InvalidOutput, match="score"):
        rules(2).check(TokenDelta(0, TOKENS, (), FinishReason.LENGTH, score=score))
