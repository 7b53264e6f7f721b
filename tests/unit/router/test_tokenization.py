from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
from tokenizers import Tokenizer

from router.tokenization import MAX_BYTES_UNDER_WAY, Tokenization
from tandem.errors import InvalidRequest, Overloaded
from tandem.types import TokenId

LONG = "the little dog ran home " * 20_000
SHORT = LONG[:3000]


class Watched:
    """A tokenizer that counts how often `turns` moved on while it was at work."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.turns = 0
        self.turns_inside = 0

    def __getattr__(self, name: str) -> Any:
        if not callable(getattr(self._tokenizer, name)):
            return getattr(self._tokenizer, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            before = self.turns
            result = getattr(self._tokenizer, name)(*args, **kwargs)
            self.turns_inside = max(self.turns_inside, self.turns - before)
            return result

        return call


class Halting:
    """A tokenizer that stops at long texts until it may go on."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.may_go_on = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        if len(texts[0]) > len(SHORT):
            self.may_go_on.wait()
        return self._tokenizer.encode_batch_fast(texts, **options)


@contextmanager
def tokenization(tokenizer: Any) -> Iterator[Tokenization]:
    made = Tokenization(tokenizer, None)
    try:
        yield made
    finally:
        made.close()


@asynccontextmanager
async def turning_loop(watched: Watched) -> AsyncIterator[None]:
    """A task that counts the turns of the event loop."""

    async def count() -> None:
        while True:
            watched.turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(count())
    yield
    task.cancel()


@pytest.fixture
def lock_kept_until_let_go() -> Iterator[None]:
    """Python takes the interpreter's lock from no thread that runs, so that only letting it go is seen."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(60)
    yield
    sys.setswitchinterval(before_s)


@pytest.mark.usefixtures("lock_kept_until_let_go")
async def test_the_loop_turns_while_a_long_text_is_tokenized_and_decoded(byte_tokenizer: Tokenizer) -> None:
    watched = Watched(byte_tokenizer)
    with tokenization(watched) as tokens:
        async with turning_loop(watched):
            token_ids = await tokens.encode_text(LONG)
            assert watched.turns_inside > 20
            watched.turns_inside = 0
            assert await tokens.decode(token_ids, skip_special_tokens=True) == LONG
            assert watched.turns_inside > 20


@pytest.mark.parametrize("text", ["", "Hi", "a<eos>b", "héllo 👩‍👧", SHORT])
async def test_tokens_are_those_of_the_tokenizers_plain_call(byte_tokenizer: Tokenizer, text: str) -> None:
    with tokenization(byte_tokenizer) as tokens:
        token_ids = await tokens.encode_text(text)
        assert list(token_ids) == byte_tokenizer.encode(text).ids
        assert await tokens.decode(token_ids, skip_special_tokens=False) == text


async def test_a_short_text_does_not_wait_for_long_ones(byte_tokenizer: Tokenizer) -> None:
    halting = Halting(byte_tokenizer)
    with tokenization(halting) as tokens:
        long = [asyncio.create_task(tokens.encode_text(LONG)) for _ in range(3)]
        await asyncio.sleep(0)
        assert len(await tokens.encode_text(SHORT)) == len(SHORT)
        assert not any(task.done() for task in long)
        halting.may_go_on.set()
        await asyncio.gather(*long)


async def test_text_that_waits_to_be_tokenized_is_bounded(byte_tokenizer: Tokenizer) -> None:
    halting = Halting(byte_tokenizer)
    with tokenization(halting) as tokens:
        taken = [asyncio.create_task(tokens.encode_text(LONG)) for _ in range(MAX_BYTES_UNDER_WAY // len(LONG))]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="bytes of text wait"):
            await tokens.encode_text(LONG)
        for task in taken[2:]:
            task.cancel()
        await asyncio.wait(taken[2:])
        halting.may_go_on.set()
        assert len(await tokens.encode_text(LONG)) == len(LONG)
        await asyncio.gather(*taken[:2])


async def test_a_text_that_no_tokens_could_hold_is_refused_untokenized(byte_tokenizer: Tokenizer) -> None:
    with tokenization(byte_tokenizer) as tokens:
        longest = len("<eos>")
        assert await tokens.encode_text("<eos>" * 4, max_tokens=4) == (256,) * 4
        with pytest.raises(InvalidRequest, match="prompt") as refused:
            await tokens.encode_text("x" * (4 * longest + 1), max_tokens=4)
        assert refused.value.field == "prompt"


def test_a_token_that_ends_a_text_has_none_of_its_own_special_or_not(byte_tokenizer: Tokenizer) -> None:
    made = Tokenization(byte_tokenizer, None, frozenset({TokenId(72)}))
    detokenizer = made.detokenizer((), skip_special_tokens=True)
    assert [detokenizer.step(TokenId(each)) for each in (71, 72)] == ["G", ""]
    made.close()
