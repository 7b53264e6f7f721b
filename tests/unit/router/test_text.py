from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from router.text import MAX_PENDING_TOKENS, Detokenizer, StopStrings, WholeTokens
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


LETTERS = st.text(alphabet="abc", max_size=24)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=0, max_size=4).map(tuple)


def naive(text: str, stops: tuple[str, ...], *, include_stop: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return (text[:end] if include_stop else text[: end - len(stop)]), stop
    return text, None


def run(pieces: list[str], stops: tuple[str, ...], *, include_stop: bool) -> tuple[str, str | None]:
    matcher = StopStrings(stops, include_stop=include_stop)
    shown = ""
    for piece in pieces:
        text, matched = matcher.feed(piece)
        shown += text
        if matched is not None:
            return shown, matched
    return shown + matcher.finish(), None


@given(LETTERS, STOPS, st.booleans(), st.data())
def test_every_split_gives_what_a_search_of_the_whole_text_gives(
    text: str, stops: tuple[str, ...], include_stop: bool, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    edges = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    assert run(pieces, stops, include_stop=include_stop) == naive(text, stops, include_stop=include_stop)


@given(LETTERS, STOPS)
def test_no_more_is_held_back_than_the_longest_tail_that_may_become_a_stop(text: str, stops: tuple[str, ...]) -> None:
    if naive(text, stops, include_stop=False)[1] is not None:
        return
    matcher = StopStrings(stops)
    shown = "".join(matcher.feed(char)[0] for char in text)
    tails = (text[cut:] for cut in range(len(text) + 1))
    longest = next(tail for tail in tails if any(stop.startswith(tail) for stop in stops) or not tail)
    assert shown + longest == text
