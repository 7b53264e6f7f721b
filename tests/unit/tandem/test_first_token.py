"""The COMMIT payload."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import FrameError
from tandem.first_token import decode_first_token, encode_first_token
from tandem.types import TokenId


@given(st.integers(0, 2**32 - 1))
def test_a_token_comes_back_as_it_went(token_id: int) -> None:
    assert decode_first_token(encode_first_token(TokenId(token_id))) == token_id


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_an_id_that_does_not_fit_is_refused(token_id: int) -> None:
    with pytest.raises(FrameError):
        encode_first_token(TokenId(token_id))


@given(st.binary().filter(lambda payload: len(payload) != 4))
def test_a_payload_of_another_length_is_refused(payload: bytes) -> None:
    with pytest.raises(FrameError):
        decode_first_token(payload)
