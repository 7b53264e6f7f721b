from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from router.choice import Choice, ChoiceDelta
from router.detokenization import Detokenizer
from tandem.types import FinishReason, TextParams, TokenDelta, TokenId, TokenLogprobs


def choice(tokenizer: Tokenizer, **params: object) -> Choice:
    return Choice(Detokenizer(tokenizer, frozenset({TokenId(256)})), TextParams(**params))  # type: ignore[arg-type]


def delta(raw: bytes | list[int], offset: int = 0, finish: FinishReason | None = None) -> TokenDelta:
    ids = tuple(map(TokenId, raw))
    return TokenDelta(offset, ids, tuple(TokenLogprobs(each, -1.0) for each in ids), finish)


def test_the_token_that_completes_a_stop_string_is_the_last_one(byte_tokenizer: Tokenizer) -> None:
    made = choice(byte_tokenizer, stop=("cd",))
    assert made.feed(delta(b"abc")) == ChoiceDelta("ab", (97, 98, 99), delta(b"abc").logprobs)
    last = made.feed(delta(b"def", 3))
    assert last == ChoiceDelta("", (100,), delta(b"d").logprobs, FinishReason.STOP, "cd")
    assert made.finished
    assert made.num_tokens == 4


def test_what_was_held_back_comes_with_the_last_token(byte_tokenizer: Tokenizer) -> None:
    made = choice(byte_tokenizer, stop=("END",))
    assert made.feed(delta(b"xEN")).text == "x"
    last = made.feed(delta([0xC3], 3, FinishReason.LENGTH))
    assert (last.text, last.finish_reason, last.matched_stop) == ("EN\ufffd", FinishReason.LENGTH, None)


def test_a_stop_that_only_the_last_flush_completes_still_counts(byte_tokenizer: Tokenizer) -> None:
    made = choice(byte_tokenizer, stop=("\ufffd",))
    last = made.feed(delta([97, 0xC3], 0, FinishReason.LENGTH))
    assert (last.text, last.finish_reason, last.matched_stop) == ("a", FinishReason.STOP, "\ufffd")


def test_end_of_text_is_a_token_without_text_and_no_callers_stop(byte_tokenizer: Tokenizer) -> None:
    last = choice(byte_tokenizer).feed(delta([97, 256], 0, FinishReason.STOP))
    assert last.token_ids == (97, 256)
    assert (last.text, last.finish_reason, last.matched_stop) == ("a", FinishReason.STOP, None)


def test_the_callers_stop_id_is_named(byte_tokenizer: Tokenizer) -> None:
    made = choice(byte_tokenizer, stop_token_ids=frozenset({TokenId(98)}))
    assert made.feed(delta(b"ab", 0, FinishReason.STOP)).matched_stop == 98


@given(st.text(alphabet="xyé", max_size=20), st.sampled_from(["xy", "é", "yx", "xé"]), st.data())
def test_text_tokens_and_end_do_not_depend_on_how_tokens_were_grouped(
    byte_tokenizer: Tokenizer, text: str, stop: str, data: st.DataObject
) -> None:
    raw = text.encode()

    def run(cuts: list[int]) -> tuple[str, tuple[int, ...], FinishReason | None, object]:
        made = choice(byte_tokenizer, stop=(stop,))
        shown, ids, edges = "", (), [0, *sorted(cuts), len(raw)]
        for start, end in pairwise(edges):
            finish = FinishReason.LENGTH if end == len(raw) else None
            if start == end and finish is None:
                continue
            part = made.feed(delta(raw[start:end], start, finish))
            shown, ids = shown + part.text, ids + part.token_ids
            if made.finished:
                return shown, ids, part.finish_reason, part.matched_stop
        raise AssertionError

    cuts = data.draw(st.lists(st.integers(0, max(0, len(raw) - 1)), max_size=6))
    assert run(cuts) == run([])
    assert run(cuts)[0] == text.split(stop, maxsplit=1)[0]
