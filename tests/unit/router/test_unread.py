from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest
from tokenizers import Tokenizer

from router.choice_stream import ChoiceStream
from router.delivery import Delivery, Unread
from router.text import Detokenizer
from shell.telemetry.events import Events
from tandem.errors import InvalidRequest, TandemError
from tandem.types import TextParams, TokenDelta, TokenId, TokenLogprobs
from tests.manual_clock import ManualClock

ALL_BYTES, LIMIT_S = 400_000, 60.0


class Requests:
    """Deliveries that are watched, and how each was ended."""

    def __init__(self, tokenizer: Tokenizer, stack: ExitStack) -> None:
        self.clock = ManualClock()
        self.unread = Unread(self.clock, ALL_BYTES, LIMIT_S)
        self.ended: list[tuple[Delivery, str]] = []
        self.retryable: list[bool] = []
        self._tokenizer, self._stack = tokenizer, stack

    def begin(self, num_tokens: int) -> Delivery:
        """One with so many tokens to read, of 200 bytes each."""
        choice = ChoiceStream(0, Detokenizer(self._tokenizer, frozenset()), TextParams(), lambda _: None)
        delivery = Delivery([choice], Events())

        def end(error: TandemError) -> None:
            self.ended.append((delivery, error.message))
            self.retryable.append(error.retryable)
            delivery.abandon(error)

        self._stack.enter_context(self.unread.watching(delivery, end))
        push(delivery, num_tokens)
        return delivery


def push(delivery: Delivery, num_tokens: int) -> None:
    ids = (TokenId(97),) * num_tokens
    logprobs = tuple(TokenLogprobs(each, -1.0) for each in ids)
    delivery.push(TokenDelta(delivery.num_tokens, ids, logprobs, None, 0))


async def test_an_answer_that_is_written_for_too_long_is_ended_and_one_that_is_waited_for_is_not(
    byte_tokenizer: Tokenizer,
) -> None:
    with ExitStack() as stack:
        requests = Requests(byte_tokenizer, stack)
        stuck, slow = requests.begin(10), requests.begin(10)
        requests.begin(0)  # its reader waits
        for _ in range(3):
            await slow.get()
            if not stuck.being_written:
                await stuck.get()
            requests.unread.sweep()
            requests.clock.advance_s(0.6 * LIMIT_S)
            push(slow, 1)
        requests.unread.sweep()

        assert requests.ended == [(stuck, "the request was ended: its answer was not read for 60 s")]


def test_a_request_is_ended_that_leaves_too_much_unread(byte_tokenizer: Tokenizer) -> None:
    with ExitStack() as stack:
        requests = Requests(byte_tokenizer, stack)
        requests.begin(10)
        large = requests.begin(600)

        requests.unread.sweep()
        requests.unread.sweep()

        assert [each for each, _ in requests.ended] == [large]


async def test_who_waits_for_a_whole_answer_that_is_too_large_is_not_told_to_ask_again(
    byte_tokenizer: Tokenizer,
) -> None:
    with ExitStack() as stack:
        requests = Requests(byte_tokenizer, stack)
        large = requests.begin(600)
        whole = asyncio.create_task(large.get_all())
        await asyncio.sleep(0)

        requests.unread.sweep()

        assert requests.retryable == [False]
        with pytest.raises(InvalidRequest, match="ask for a stream"):
            await whole


def test_with_too_much_unread_in_all_those_are_ended_that_have_the_most(byte_tokenizer: Tokenizer) -> None:
    with ExitStack() as stack:
        requests = Requests(byte_tokenizer, stack)
        _, largest, *others = (requests.begin(count) for count in (50, 480, 300, 350, 400, 400, 450))

        requests.unread.sweep()

        assert [each for each, _ in requests.ended] == [largest]
        assert sum(each.unread_bytes for each in others) <= ALL_BYTES


def test_sweeps_that_come_too_often_are_left_out(byte_tokenizer: Tokenizer) -> None:
    with ExitStack() as stack:
        requests = Requests(byte_tokenizer, stack)
        requests.unread.sweep_if_due()
        large = requests.begin(600)

        requests.unread.sweep_if_due()
        assert requests.ended == []

        requests.clock.advance_s(1.0)
        requests.unread.sweep_if_due()
        assert [each for each, _ in requests.ended] == [large]
