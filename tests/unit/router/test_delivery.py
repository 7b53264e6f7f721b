"""A request's way out: order, text, stop strings, and what a slow reader finds; for one choice and for several."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from router.choice_stream import ChoiceOutput, ChoiceStream
from router.delivery import Delivery
from router.metrics import Summary
from router.text import Detokenizer
from shell.telemetry.events import Events, RequestEvents
from tandem.errors import Unavailable
from tandem.types import (
    ChoiceSpec,
    FinishReason,
    TextParams,
    TokenDelta,
    TokenId,
    TokenLogprobs,
)
from tests.recorded_events import RecordedRequest

SUMMARY = Summary(1, 3, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0)
LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


def choice(tokenizer: Tokenizer, index: int = 0, **params: Any) -> ChoiceStream:
    detokenizer = Detokenizer(tokenizer, frozenset({TokenId(256)}))
    return ChoiceStream(index, detokenizer, TextParams(**params), lambda _: None)


def delivery(
    tokenizer: Tokenizer, n: int = 1, events: RequestEvents | None = None, interval_s: float = 0.0, **params: Any
) -> Delivery:
    choices = [choice(tokenizer, index, **params) for index in range(n)]
    return Delivery(choices, events or Events(), interval_s=interval_s)


def delta(raw: bytes | list[int], offset: int = 0, finish: FinishReason | None = None, index: int = 0) -> TokenDelta:
    ids = tuple(map(TokenId, raw))
    return TokenDelta(offset, ids, tuple(TokenLogprobs(each, -1.0) for each in ids), finish, index)


def output(raw: bytes, index: int = 0, finish: FinishReason | None = None, summary: Summary | None = None) -> Any:
    return ChoiceOutput(index, raw.decode(), tuple(map(TokenId, raw)), delta(raw).logprobs, finish, None, summary)


# --- one choice: order ---


def test_a_finish_reason_may_come_without_a_token(byte_tokenizer: Tokenizer) -> None:
    made = choice(byte_tokenizer)
    made.push(delta(b"a"))
    assert made.push(delta(b"", 1, STOP)) == 0
    assert made.finish_reason is STOP


def test_what_waited_from_a_lost_pair_can_be_forgotten(byte_tokenizer: Tokenizer) -> None:
    made = choice(byte_tokenizer)
    made.push(delta(b"x", 2))
    made.forget_early()
    made.push(delta(b"ab"))
    assert made.spec == ChoiceSpec(0, (97, 98))


@given(st.integers(1, 12), st.data())
def test_any_order_with_repeats_gives_each_token_once_and_in_order(
    byte_tokenizer: Tokenizer, length: int, data: st.DataObject
) -> None:
    text = b"abcdefghijkl"[:length]
    parts = [
        delta(text[start:end], start, LENGTH if end == length else None)
        for start in range(length)
        for end in range(start + 1, length + 1)
    ]
    singles = [each for each in parts if len(each.token_ids) == 1]
    extra = data.draw(st.lists(st.sampled_from(parts), max_size=6))
    made = delivery(byte_tokenizer)
    for each in data.draw(st.permutations([*singles, *extra])):
        made.push(each)
    assert made.finished
    made.close(SUMMARY)
    assert asyncio.run(made.get()) == output(text, 0, LENGTH, SUMMARY)


# --- one choice: text and stops ---


def test_the_token_that_completes_a_stop_string_is_the_last_one(byte_tokenizer: Tokenizer) -> None:
    made = choice(byte_tokenizer, stop=("cd",))
    made.push(delta(b"abc"))
    assert made.read(None).text == "ab"
    assert made.push(delta(b"def", 3)) == 1
    assert made.read(None) == ChoiceOutput(0, "", (TokenId(100),), delta(b"d").logprobs, STOP, "cd")
    assert made.num_tokens == 4


def test_what_was_held_back_comes_with_the_last_token(byte_tokenizer: Tokenizer) -> None:
    made = choice(byte_tokenizer, stop=("END",))
    made.push(delta(b"xEN"))
    assert made.read(None).text == "x"
    made.push(delta([0xC3], 3, LENGTH))
    last = made.read(None)
    assert (last.text, last.finish_reason, last.matched_stop) == ("EN\ufffd", LENGTH, None)


def test_a_stop_that_only_the_last_flush_completes_still_counts(byte_tokenizer: Tokenizer) -> None:
    made = choice(byte_tokenizer, stop=("\ufffd",))
    made.push(delta([97, 0xC3], 0, LENGTH))
    last = made.read(None)
    assert (last.text, last.finish_reason, last.matched_stop) == ("a", STOP, "\ufffd")


def test_end_of_text_is_a_token_without_text_and_no_callers_stop(byte_tokenizer: Tokenizer) -> None:
    made = choice(byte_tokenizer)
    made.push(delta([97, 256], 0, STOP))
    last = made.read(None)
    assert (last.text, last.token_ids, last.finish_reason, last.matched_stop) == ("a", (97, 256), STOP, None)


def test_a_stop_string_across_tokens_is_kept_on_request_and_every_token_has_its_logprobs(
    byte_tokenizer: Tokenizer,
) -> None:
    made = choice(byte_tokenizer, stop=("END",), include_stop=True)
    for offset, byte in enumerate(b"xEND"):
        made.push(delta([byte], offset))
    last = made.read(None)
    assert (last.text, last.token_ids, last.matched_stop) == ("xEND", tuple(b"xEND"), "END")
    assert [each.token_id for each in last.logprobs] == list(b"xEND")


@pytest.mark.parametrize(("stop", "text", "matched"), [("ab", "", "ab"), ("abc", "ab", 98), ("b", "a", "b")])
def test_a_stop_id_inside_a_stop_string_ends_the_choice_and_the_string_is_named_if_it_is_whole(
    byte_tokenizer: Tokenizer, stop: str, text: str, matched: str | int
) -> None:
    made = choice(byte_tokenizer, stop=(stop,), stop_token_ids=frozenset({TokenId(98)}))
    made.push(delta(b"ab", 0, STOP))
    last = made.read(None)
    assert (last.text, last.token_ids, last.finish_reason, last.matched_stop) == (text, (97, 98), STOP, matched)


@given(st.text(alphabet="xyé", max_size=20), st.sampled_from(["xy", "é", "yx", "xé"]), st.data())
def test_text_tokens_and_end_do_not_depend_on_how_tokens_were_grouped(
    byte_tokenizer: Tokenizer, text: str, stop: str, data: st.DataObject
) -> None:
    raw = text.encode()

    def run(cuts: list[int]) -> ChoiceOutput:
        made = choice(byte_tokenizer, stop=(stop,))
        for start, end in pairwise([0, *sorted(cuts), len(raw)]):
            if made.finish_reason is None:
                made.push(delta(raw[start:end], start, LENGTH if end == len(raw) else None))
        return made.read(None)

    cuts = data.draw(st.lists(st.integers(0, max(0, len(raw) - 1)), max_size=6))
    assert run(cuts) == run([])
    assert run(cuts).text == text.split(stop, maxsplit=1)[0]


# --- the reader ---


async def test_tokens_that_wait_are_read_before_the_error(byte_tokenizer: Tokenizer) -> None:
    made = delivery(byte_tokenizer)
    made.push(delta(b"a"))
    made.fail(Unavailable("lost"))
    assert await made.get() == output(b"a")
    with pytest.raises(Unavailable):
        await made.get()


async def test_after_an_output_what_comes_within_the_interval_is_merged(byte_tokenizer: Tokenizer) -> None:
    made = delivery(byte_tokenizer, interval_s=0.01)
    made.push(delta(b"a"))
    assert await made.get() == output(b"a")
    for offset, raw in enumerate((b"b", b"c"), start=1):
        made.push(delta(raw, offset))
    assert await made.get() == output(b"bc")


@pytest.mark.parametrize("ends_well", [True, False])
async def test_neither_an_end_nor_an_error_waits_for_the_interval(byte_tokenizer: Tokenizer, ends_well: bool) -> None:
    made = delivery(byte_tokenizer, interval_s=3600.0)
    made.push(delta(b"a"))
    await made.get()
    made.push(delta(b"b", 1))
    reading = asyncio.create_task(made.get())
    await asyncio.sleep(0)
    assert not reading.done()
    if ends_well:
        made.push(delta(b"c", 2, LENGTH))
        made.close(SUMMARY)
        assert await reading == output(b"bc", 0, LENGTH, SUMMARY)
    else:
        made.fail(Unavailable("gone"))
        assert await reading == output(b"b")
        with pytest.raises(Unavailable):
            await made.get()


# --- several choices ---


async def test_a_slow_reader_finds_one_merged_output_per_choice(byte_tokenizer: Tokenizer) -> None:
    made = delivery(byte_tokenizer, 3)
    for offset in range(3):
        for index in (2, 0, 1):
            made.push(delta(b"abc"[offset : offset + 1], offset, index=index))
    assert [await made.get() for _ in range(3)] == [output(b"abc", index) for index in (2, 0, 1)]


async def test_each_choice_ends_by_itself_and_the_last_one_brings_the_summary(byte_tokenizer: Tokenizer) -> None:
    made = delivery(byte_tokenizer, 2)
    made.push(delta(b"a", 0, STOP, index=1))
    assert await made.get() == output(b"a", 1, STOP)
    assert not made.finished
    made.push(delta(b"bc", 0, LENGTH, index=0))
    made.close(SUMMARY)
    assert await made.get() == output(b"bc", 0, LENGTH, SUMMARY)
    assert made.finish_reasons == (LENGTH, STOP)


async def test_a_stop_string_ends_its_choice_alone_and_later_tokens_of_it_are_dropped(
    byte_tokenizer: Tokenizer,
) -> None:
    recorded = RecordedRequest()
    made = delivery(byte_tokenizer, 2, recorded.events, stop=("b",))
    made.push(delta(b"abab", 0, index=0))
    made.push(delta(b"cc", 4, index=0))
    made.push(delta(b"xyz", 0, index=1))
    assert [each.index for each in made.open_choices] == [1]
    assert (made.num_tokens, made.num_tokens_of(0)) == (5, 2)
    assert recorded.calls == [("TokensArrived", 2, 0), ("TokensArrived", 3, 1)]
    first = await made.get()
    assert (first.text, first.token_ids, first.matched_stop) == ("a", (97, 98), "b")


@given(st.integers(1, 16), st.data())
def test_choices_in_any_order_and_read_at_any_time_come_out_whole(
    byte_tokenizer: Tokenizer, n: int, data: st.DataObject
) -> None:
    texts = [
        data.draw(st.binary(min_size=1, max_size=6).map(lambda raw: bytes(97 + b % 26 for b in raw))) for _ in range(n)
    ]
    singles = [
        delta(text[at : at + 1], at, LENGTH if at + 1 == len(text) else None, index)
        for index, text in enumerate(texts)
        for at in range(len(text))
    ]
    deltas = data.draw(st.permutations(singles))
    reads = data.draw(st.lists(st.booleans(), min_size=len(deltas), max_size=len(deltas)))

    async def run() -> list[ChoiceOutput]:
        made = delivery(byte_tokenizer, n)
        outputs: list[ChoiceOutput] = []
        reading: asyncio.Task[ChoiceOutput] | None = None
        for each, reads_now in zip(deltas, reads, strict=True):
            made.push(each)
            reading = reading or (asyncio.create_task(made.get()) if reads_now else None)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if reading is not None and reading.done():
                outputs.append(reading.result())
                reading = None
        made.close(SUMMARY)
        if reading is not None:
            outputs.append(await reading)
        while outputs[-1:] == [] or outputs[-1].summary is None:
            outputs.append(await made.get())
        return outputs

    outputs = asyncio.run(run())
    for index, text in enumerate(texts):
        own = [each for each in outputs if each.index == index]
        assert b"".join(bytes(each.token_ids) for each in own) == text
        assert "".join(each.text for each in own) == text.decode()
        assert [each.finish_reason for each in own] == [None] * (len(own) - 1) + [LENGTH]
    assert [each.summary for each in outputs] == [None] * (len(outputs) - 1) + [SUMMARY]


# --- what is not read ---


async def test_a_large_answer_leaves_in_outputs_of_bounded_size(byte_tokenizer: Tokenizer) -> None:
    out = delivery(byte_tokenizer, 2)
    text = bytes(97 + number % 26 for number in range(5000))
    for index in (0, 1):
        out.push(delta(text, 0, LENGTH, index))
    assert out.unread_bytes > 2 * len(text)
    out.close(SUMMARY)

    outputs = [await out.get()]
    while outputs[-1].summary is None:
        outputs.append(await out.get())

    assert max(len(each.token_ids) for each in outputs) == 2048  # a token and its log-probability weigh two
    assert [each.finish_reason for each in outputs] == [None, None, None, None, LENGTH, LENGTH]
    for index in (0, 1):
        own = [each for each in outputs if each.index == index]
        assert "".join(each.text for each in own).encode() == text
        assert all(len(each.text) == len(each.token_ids) == len(each.logprobs) for each in own)
    assert out.being_written


async def test_an_answer_that_is_dropped_ends_with_the_reason_and_takes_no_memory(byte_tokenizer: Tokenizer) -> None:
    out = delivery(byte_tokenizer, 2)
    out.push(delta(b"abc", 0, LENGTH, 0))
    out.push(delta(b"abc", 0, LENGTH, 1))
    out.close(SUMMARY)
    await out.get()

    out.abandon(Unavailable("slow"))
    out.push(delta(b"d", 3, LENGTH, 1))

    with pytest.raises(Unavailable):
        await out.get()
    with pytest.raises(Unavailable):
        await out.get_all()
    assert out.unread_bytes == 0


# --- tokens alone, as nearly all are ---


@given(st.text(alphabet="ab é€", min_size=1, max_size=12), st.sampled_from([(), ("b ",)]), st.data())
def test_bare_tokens_read_at_any_time_give_what_all_at_once_gives(
    byte_tokenizer: Tokenizer, text: str, stop: tuple[str, ...], data: st.DataObject
) -> None:
    raw = text.encode()
    bare = [TokenDelta(at, (TokenId(each),)) for at, each in enumerate(raw)]
    bare[-1] = bare[-1]._replace(finish_reason=LENGTH)
    once, each_read = choice(byte_tokenizer, stop=stop), choice(byte_tokenizer, stop=stop)
    once.push(TokenDelta(0, tuple(map(TokenId, raw)), finish_reason=LENGTH))
    outputs = []
    for delta in data.draw(st.permutations(bare)) if data.draw(st.booleans()) else bare:
        if each_read.finish_reason is None:
            each_read.push(delta)
        if data.draw(st.booleans()):
            outputs.append(each_read.read(None))
    outputs.append(each_read.read(None))

    whole = once.read(None)
    assert "".join(each.text for each in outputs) == whole.text
    assert sum((each.token_ids for each in outputs), ()) == whole.token_ids
    assert {each.finish_reason for each in outputs} - {None} == {whole.finish_reason}
    assert outputs[-1].matched_stop in (None, whole.matched_stop)
