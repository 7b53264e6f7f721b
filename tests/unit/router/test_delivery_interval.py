from __future__ import annotations

import asyncio

import pytest
from tokenizers import Tokenizer

from router.choice_stream import ChoiceStream
from router.delivery import Delivery
from router.metrics import Summary
from router.text import Detokenizer
from shell.telemetry.events import Events
from tandem.errors import Unavailable
from tandem.types import FinishReason, TextParams, TokenDelta, TokenId

SUMMARY = Summary(1, 3, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0)


def delivery(tokenizer: Tokenizer, interval_s: float) -> Delivery:
    """Of one choice."""
    choice = ChoiceStream(0, Detokenizer(tokenizer, frozenset()), TextParams(), lambda _: None)
    return Delivery([choice], Events(), interval_s=interval_s)


def delta(raw: bytes, offset: int = 0, finish: FinishReason | None = None) -> TokenDelta:
    return TokenDelta(offset, tuple(map(TokenId, raw)), finish_reason=finish)


async def test_after_an_output_what_comes_within_the_interval_is_merged(byte_tokenizer: Tokenizer) -> None:
    out = delivery(byte_tokenizer, 0.01)
    out.push(delta(b"a"))
    assert (await out.get()).text == "a"
    for offset, raw in enumerate((b"b", b"c"), start=1):
        out.push(delta(raw, offset))
    assert (await out.get()).text == "bc"


async def test_the_end_does_not_wait_for_the_interval(byte_tokenizer: Tokenizer) -> None:
    out = delivery(byte_tokenizer, 3600.0)
    out.push(delta(b"a"))
    await out.get()
    out.push(delta(b"b", 1))
    reading = asyncio.create_task(out.get())
    await asyncio.sleep(0)
    assert not reading.done()

    out.push(delta(b"c", 2, FinishReason.LENGTH))
    out.close(SUMMARY)
    last = await reading
    assert (last.text, last.finish_reason, last.summary) == ("bc", FinishReason.LENGTH, SUMMARY)


async def test_an_error_does_not_wait_for_the_interval(byte_tokenizer: Tokenizer) -> None:
    out = delivery(byte_tokenizer, 3600.0)
    out.push(delta(b"a"))
    await out.get()
    out.push(delta(b"b", 1))
    out.fail(Unavailable("gone"))
    assert (await out.get()).text == "b"
    with pytest.raises(Unavailable):
        await out.get()
