"""The COMMIT payload."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import FrameError
from tandem.first_tokens import NextTokens, decode_first_tokens, encode_first_tokens
from tandem.types import Candidates, TokenId

TOKENS = st.dictionaries(st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1).map(TokenId), max_size=20)


CANDIDATES = st.dictionaries(
    st.integers(0, 2**32 - 1).map(TokenId), st.floats(-(2.0**100), 100, width=32), min_size=1
).map(lambda found: tuple(sorted(found.items(), key=lambda each: -each[1])))


@given(CANDIDATES)
def test_candidates_come_back_to_the_last_bit(candidates: Candidates) -> None:
    assert decode_first_tokens(encode_first_tokens(candidates)) == candidates


@given(TOKENS)
def test_tokens_come_back_as_they_went(tokens: dict[int, TokenId]) -> None:
    assert decode_first_tokens(encode_first_tokens(tokens)) == tokens


RUNNING = st.dictionaries(
    st.integers(0, 2**16 - 1), st.lists(st.integers(0, 2**32 - 1).map(TokenId), min_size=1, max_size=9), min_size=1
)


@given(RUNNING)
def test_tokens_of_running_choices_come_back_in_order(by_choice: dict[int, list[TokenId]]) -> None:
    next_tokens = NextTokens({index: tuple(token_ids) for index, token_ids in by_choice.items()})
    assert decode_first_tokens(encode_first_tokens(next_tokens)) == next_tokens


def test_the_payload_is_as_documented() -> None:
    assert (
        encode_first_tokens(NextTokens({1: (TokenId(258), TokenId(3))}))
        == b"\x03\x03\x00\x02\x00\x01\x00\x00\x01\x02\x00\x01\x00\x00\x00\x03"
    )
    assert encode_first_tokens({3: TokenId(258)}) == b"\x03\x00\x00\x01\x00\x03\x00\x00\x01\x02"
    assert encode_first_tokens(((TokenId(258), -0.5),)) == b"\x03\x01\x00\x01\x00\x00\x01\x02\xbf\x00\x00\x00"


@pytest.mark.parametrize("tokens", [{0: -1}, {0: 2**32}, {-1: 0}, {2**16: 0}])
def test_what_does_not_fit_is_refused(tokens: dict[int, TokenId]) -> None:
    with pytest.raises(FrameError):
        encode_first_tokens(tokens)


@given(TOKENS, st.integers(0, 130))
def test_a_payload_that_is_cut_short_is_refused(tokens: dict[int, TokenId], length: int) -> None:
    payload = encode_first_tokens(tokens)
    if length < len(payload):
        with pytest.raises(FrameError):
            decode_first_tokens(payload[:length])


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"\x00\x00\x00\x07", "version 0"),
        (b"\x02\x00\x00\x00", "version 2"),
        (b"\x03\x02\x00\x00", "kind 2"),
        (b"\x03\x03\x00\x00", "no next token"),
        (b"\x03\x03\x00\x02\x00\x00\x00\x00\x00\x05", "does not hold"),
        (b"\x03\x00\x00\x00\x00", "does not hold"),
        (b"\x03\x00\x00\x02" + 2 * b"\x00\x01\x00\x00\x00\x05", "twice"),
        (b"\x03\x01\x00\x02" + 2 * (b"\x00\x00\x00\x05" + struct.pack("!f", -1.0)), "twice"),
        (b"\x03\x01\x00\x00", "none, not finite or not in order"),
        (b"\x03\x01\x00\x01\x00\x00\x00\x05" + struct.pack("!f", math.nan), "not finite"),
        (struct.pack("!BBHIfIf", 3, 1, 2, 5, -2.0, 6, -1.0), "not in order"),
    ],
)
def test_another_payload_is_refused_with_the_reason(payload: bytes, message: str) -> None:
    with pytest.raises(FrameError, match=message):
        decode_first_tokens(payload)
