from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.stream import TokenStream
from tandem.types import FinishReason, TokenDelta, TokenId, TokenLogprobs


def delta(offset: int, *ids: int, finish: FinishReason | None = None) -> TokenDelta:
    token_ids = tuple(TokenId(i) for i in ids)
    logprobs = tuple(TokenLogprobs(i, -float(i)) for i in token_ids)
    return TokenDelta(offset, token_ids, logprobs, finish)


def test_a_second_token_that_overtakes_the_first_waits_for_it() -> None:
    stream = TokenStream()
    assert stream.push(delta(1, 11)) == []
    assert stream.push(delta(0, 10)) == [delta(0, 10), delta(1, 11)]
    assert stream.token_ids == (10, 11)


def test_known_tokens_and_their_logprobs_are_trimmed() -> None:
    stream = TokenStream()
    stream.push(delta(0, 10, 11))
    assert stream.push(delta(0, 10)) == []
    assert stream.push(delta(1, 11, 12)) == [delta(2, 12)]


def test_the_end_counts_only_once_all_before_it_is_known() -> None:
    stream = TokenStream()
    stream.push(delta(1, 11, finish=FinishReason.LENGTH))
    assert stream.finish_reason is None
    stream.push(delta(0, 10))
    assert stream.finish_reason is FinishReason.LENGTH


def test_nothing_follows_the_end() -> None:
    stream = TokenStream()
    stream.push(delta(0, 10, finish=FinishReason.STOP))
    assert stream.push(delta(1, 11)) == []
    assert stream.token_ids == (10,)


def test_a_finish_reason_may_come_without_a_token() -> None:
    stream = TokenStream()
    stream.push(delta(0, 10))
    assert stream.push(delta(1, finish=FinishReason.STOP)) == [delta(1, finish=FinishReason.STOP)]
    assert stream.finish_reason is FinishReason.STOP


def test_what_waited_from_a_lost_pair_can_be_forgotten() -> None:
    stream = TokenStream()
    stream.push(delta(2, 99))
    stream.forget_waiting()
    stream.push(delta(0, 10, 11))
    assert stream.token_ids == (10, 11)


@given(st.integers(1, 12), st.data())
def test_any_order_with_repeats_gives_each_token_once_and_in_order(length: int, data: st.DataObject) -> None:
    whole = [
        delta(start, *range(start, end), finish=FinishReason.LENGTH if end == length else None)
        for start in range(length)
        for end in range(start + 1, length + 1)
    ]
    singles = [delta(i, i, finish=FinishReason.LENGTH if i == length - 1 else None) for i in range(length)]
    extra = data.draw(st.lists(st.sampled_from(whole), max_size=6))
    pushes = data.draw(st.permutations([*singles, *extra]))
    stream = TokenStream()
    seen = [token for push in pushes for ready in stream.push(push) for token in ready.token_ids]
    assert seen == list(range(length))
    assert stream.finish_reason is FinishReason.LENGTH
