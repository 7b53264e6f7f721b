from __future__ import annotations

import asyncio

import pytest

from router.choice import ChoiceDelta
from router.outbox import Message, Outbox
from router.timeline import Summary
from tandem.errors import Unavailable
from tandem.types import FinishReason, TokenId

SUMMARY = Summary(1, 3, 0.0, 0.0, 0.0, 0.0, 0.0, 0)


def delta(text: str, finish: FinishReason | None = None) -> ChoiceDelta:
    return ChoiceDelta(text, tuple(map(TokenId, text.encode())), finish_reason=finish)


async def test_what_waits_is_merged_into_one_message() -> None:
    outbox = Outbox()
    outbox.put(delta("a"))
    outbox.put(delta("bc"))
    assert await outbox.get() == Message(delta("abc"))


async def test_the_last_tokens_leave_together_with_the_summary() -> None:
    outbox = Outbox()
    outbox.put(delta("ab"))
    outbox.put(delta("c", FinishReason.LENGTH))
    reading = asyncio.create_task(outbox.get())
    await asyncio.sleep(0)
    assert not reading.done()
    outbox.close(SUMMARY)
    assert await reading == Message(delta("abc", FinishReason.LENGTH), SUMMARY)


async def test_tokens_that_wait_are_read_before_the_error() -> None:
    outbox = Outbox()
    outbox.put(delta("a"))
    outbox.fail(Unavailable("lost"))
    assert await outbox.get() == Message(delta("a"))
    with pytest.raises(Unavailable):
        await outbox.get()


async def test_everything_at_once_waits_for_the_end() -> None:
    outbox = Outbox()
    reading = asyncio.create_task(outbox.get_all())
    outbox.put(delta("ab"))
    await asyncio.sleep(0)
    outbox.put(delta("c", FinishReason.STOP))
    await asyncio.sleep(0)
    assert not reading.done()
    outbox.close(SUMMARY)
    assert await reading == Message(delta("abc", FinishReason.STOP), SUMMARY)
