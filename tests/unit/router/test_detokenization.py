from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from router.text import MAX_PENDING_TOKENS, Detokenizer, WholeTokens
from tandem.types import TokenId

EOS = TokenId(256)


def stream(tokenizer: Tokenizer, token_ids: list[int], skipped: frozenset[TokenId] = frozenset()) -> list[str]:
    """The same text, whether whole characters are looked up or not."""

    def pieces(whole: WholeTokens | None) -> list[str]:
        detokenizer = Detokenizer(tokenizer, skipped, whole)
        return [*(detokenizer.step(TokenId(each)) for each in token_ids), detokenizer.finish()]

    found = pieces(WholeTokens.of(tokenizer))
    assert "".join(found) == "".join(pieces(None))
    return found


@given(st.text())
def test_text_comes_out_as_it_went_in(byte_tokenizer: Tokenizer, text: str) -> None:
    assert "".join(stream(byte_tokenizer, list(text.encode()))) == text


@given(st.binary(max_size=80))
def test_any_bytes_give_what_decoding_them_at_once_gives(byte_tokenizer: Tokenizer, raw: bytes) -> None:
    whole = byte_tokenizer.decode(list(raw), skip_special_tokens=False)
    assert "".join(stream(byte_tokenizer, list(raw))) == whole == raw.decode(errors="replace")


@given(st.text(alphabet="aé€😀", max_size=12))
def test_a_character_is_held_back_until_it_is_whole(byte_tokenizer: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(byte_tokenizer, frozenset())
    for char in text:
        *parts, last = char.encode()
        assert all(detokenizer.step(TokenId(part)) == "" for part in parts)
        assert detokenizer.step(TokenId(last)) == char


def test_bytes_that_never_make_a_character_are_let_go_after_a_while(byte_tokenizer: Tokenizer) -> None:
    length = 5 * MAX_PENDING_TOKENS
    pieces = stream(byte_tokenizer, [0x80] * length)
    assert sum(map(bool, pieces[:-1])) >= 4
    assert "".join(pieces) == "\ufffd" * length


@given(st.binary(min_size=100, max_size=140).map(lambda raw: bytes(byte | 0x80 for byte in raw)))
def test_long_garbage_loses_no_text(byte_tokenizer: Tokenizer, raw: bytes) -> None:
    assert "".join(stream(byte_tokenizer, [*raw, *b"end"])).endswith("end")


def test_skipped_tokens_have_no_text_and_do_not_pile_up(byte_tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_tokenizer, frozenset({EOS}))
    assert [detokenizer.step(each) for each in (TokenId(0xC3), *[EOS] * 1000, TokenId(0xA9))] == [*[""] * 1001, "é"]


def test_ids_that_the_tokenizer_does_not_have_are_no_text(byte_tokenizer: Tokenizer) -> None:
    assert "".join(stream(byte_tokenizer, [72, 9999, 105])) == "Hi"


@given(st.lists(st.sampled_from([257, 258, 259, 260, 261, 0x61 + 1]), max_size=20))
def test_spaces_between_words_are_those_of_the_whole_text(sentencepiece_tokenizer: Tokenizer, ids: list[int]) -> None:
    assert "".join(stream(sentencepiece_tokenizer, ids)) == sentencepiece_tokenizer.decode(ids)


@given(
    st.lists(st.sampled_from([257, 258, 259, 260, 261, 0x61 + 1]), min_size=1, max_size=9),
    st.lists(st.sampled_from([257, 258, 259, 260, 261, 0x61 + 1]), max_size=9),
)
def test_prompt_and_text_together_are_the_whole_text(
    sentencepiece_tokenizer: Tokenizer, prompt: list[int], ids: list[int]
) -> None:
    detokenizer = Detokenizer(sentencepiece_tokenizer, frozenset(), None, [TokenId(each) for each in prompt])
    text = "".join([*(detokenizer.step(TokenId(each)) for each in ids), detokenizer.finish()])
    assert sentencepiece_tokenizer.decode(prompt) + text == sentencepiece_tokenizer.decode(prompt + ids)


@pytest.mark.parametrize("prompt", [[0xE4 + 1], [0xE4 + 1, 0xBD + 1], [0xBD + 1, 0xA0 + 1, 258]])
def test_a_prompt_that_is_cut_within_a_character_adds_nothing(
    sentencepiece_tokenizer: Tokenizer, prompt: list[int]
) -> None:
    detokenizer = Detokenizer(sentencepiece_tokenizer, frozenset(), None, [TokenId(each) for each in prompt])
    assert detokenizer.step(TokenId(259)).strip() == "you"


# A byte that is no character garbles the ASCII bytes beside it when all are decoded at once, so: none.
@given(st.lists(st.integers(129, 261), max_size=60))
def test_byte_fallback_never_raises_and_keeps_every_letter(sentencepiece_tokenizer: Tokenizer, ids: list[int]) -> None:
    text = "".join(stream(sentencepiece_tokenizer, ids))
    whole = sentencepiece_tokenizer.decode(ids)
    assert [char for char in text if char in "Hiyou"] == [char for char in whole if char in "Hiyou"]


def test_only_tokens_that_are_bytes_and_whole_characters_are_looked_up(
    byte_tokenizer: Tokenizer, sentencepiece_tokenizer: Tokenizer
) -> None:
    whole = WholeTokens.of(byte_tokenizer)
    assert whole is not None
    assert [whole.text_of(TokenId(each)) for each in (72, 0xC3, 9999)] == ["H", None, None]
    assert WholeTokens.of(sentencepiece_tokenizer) is None


@given(st.lists(st.sampled_from([*"aé€😀".encode(), 0x61, 0x62, 256, 0xFF]), max_size=40))
def test_whole_characters_amid_broken_ones_give_what_decoding_them_at_once_gives(
    byte_tokenizer: Tokenizer, token_ids: list[int]
) -> None:
    whole = byte_tokenizer.decode(token_ids, skip_special_tokens=False)
    assert "".join(stream(byte_tokenizer, token_ids)) == whole
