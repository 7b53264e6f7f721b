from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from router import tokenization
from router.tokenization import MAX_BYTES_UNDER_WAY, Tokenization, can_be_cut, pieces
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
def serving(tokenizer: Any) -> Iterator[Tokenization]:
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
    with serving(watched) as tokens:
        async with turning_loop(watched):
            token_ids = await tokens.encode_text(LONG)
            assert watched.turns_inside > 20
            watched.turns_inside = 0
            assert await tokens.decode(token_ids, skip_special_tokens=True) == LONG
            assert watched.turns_inside > 20


@pytest.mark.parametrize("text", ["", "Hi", "a<eos>b", "héllo 👩‍👧", SHORT])
async def test_tokens_are_those_of_the_tokenizers_plain_call(byte_tokenizer: Tokenizer, text: str) -> None:
    with serving(byte_tokenizer) as tokens:
        token_ids = await tokens.encode_text(text)
        assert list(token_ids) == byte_tokenizer.encode(text).ids
        assert await tokens.decode(token_ids, skip_special_tokens=False) == text


async def test_a_short_text_does_not_wait_for_long_ones(byte_tokenizer: Tokenizer) -> None:
    halting = Halting(byte_tokenizer)
    with serving(halting) as tokens:
        long = [asyncio.create_task(tokens.encode_text(LONG)) for _ in range(3)]
        await asyncio.sleep(0)
        assert len(await tokens.encode_text(SHORT)) == len(SHORT)
        assert not any(task.done() for task in long)
        halting.may_go_on.set()
        await asyncio.gather(*long)


async def test_text_that_waits_to_be_tokenized_is_bounded(byte_tokenizer: Tokenizer) -> None:
    halting = Halting(byte_tokenizer)
    with serving(halting) as tokens:
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
    with serving(byte_tokenizer) as tokens:
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


DEMO = Path(__file__).parents[3] / "models" / "demo" / "checkpoint"
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXT = st.text(st.sampled_from("abZ019 .,'s!\n\r\t  éß中\u0301\u00a0<|pad|>"), max_size=60)


def tokenizer(expression: str | None = None) -> Tokenizer:
    """The demo model's, with another pre-tokenizer if an expression is given."""
    tokens = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    if expression is not None:
        split = pre_tokenizers.Split(Regex(expression), "isolated")
        tokens.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, True, False)])
        tokens.normalizer = normalizers.NFC()
    return tokens


def metaspace() -> Tokenizer:
    """Of whole texts in which spaces are written as another character: no pre-tokenizer splits them."""
    characters = "▁\n\r\téß中" + "".join(map(chr, range(0x21, 0x7F)))
    merges = [("a", "b"), ("▁", "▁"), ("▁", "a"), ("0", "1"), ("▁a", "b")]
    words = [*dict.fromkeys(characters), *("".join(pair) for pair in merges)]
    tokens = Tokenizer(models.BPE({word: each for each, word in enumerate(words)}, merges))
    tokens.normalizer = normalizers.Replace(" ", "▁")
    return tokens


@pytest.mark.parametrize(
    "tokens",
    [
        tokenizer(),
        tokenizer(LLAMA_3),
        tokenizer(LLAMA_3.replace("{1,3}", "")),
        tokenizer(LLAMA_3.replace("'s|", "")),
        metaspace(),
    ],
    ids=["gpt-2", "llama-3", "qwen", "unknown", "metaspace"],
)
@given(text=TEXT)
def test_pieces_give_the_tokens_of_the_whole(tokens: Tokenizer, text: str) -> None:
    assert can_be_cut(tokens)
    whole = tokens.encode(text, add_special_tokens=False).ids

    for length in (0, 3, 10):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tokenization, "_PIECE_CHARACTERS", length)
            parts = list(pieces(text))
        assert "".join(parts) == text
        assert [each for part in parts for each in tokens.encode(part, add_special_tokens=False).ids] == whole


def test_a_text_is_cut_where_it_can_be() -> None:
    assert max(map(len, pieces(LONG))) < 66_000
    assert list(pieces("x" * 200_000)) == ["x" * 200_000]


async def test_special_tokens_stand_around_the_whole_text() -> None:
    tokens = tokenizer()
    tokens.post_processor = processors.TemplateProcessing(single="<|pad|> $A <|pad|>", special_tokens=[("<|pad|>", 0)])
    with serving(tokens) as served:
        assert list(await served.encode_text(LONG)) == tokens.encode(LONG).ids


def spanning() -> Tokenizer:
    return Tokenizer(models.BPE({"a": 0, " ": 1, "a ": 2}, [("a", " ")]))


def prepending() -> Tokenizer:
    tokens = tokenizer()
    tokens.normalizer = normalizers.Prepend("_")
    return tokens


def stripping() -> Tokenizer:
    tokens = tokenizer()
    tokens.normalizer = normalizers.Strip()
    return tokens


def dropping() -> Tokenizer:
    """It knows no "!": the spaces around one are one token."""
    vocabulary = {each: number for number, each in enumerate(metaspace().get_vocab()) if each != "!"}
    tokens = Tokenizer(models.BPE(vocabulary, [("▁", "▁")]))
    tokens.normalizer = normalizers.Replace(" ", "▁")
    return tokens


def adding(token: AddedToken) -> Tokenizer:
    tokens = tokenizer()
    tokens.add_tokens([token])
    return tokens


@pytest.mark.parametrize(
    "tokens",
    [
        *(spanning(), prepending(), stripping(), dropping()),
        *(adding(AddedToken("dog ran")), adding(AddedToken("<x>", rstrip=True))),
    ],
    ids=["token spans", "mark at the start", "stripped", "dropped", "added token spans", "added token takes spaces"],
)
def test_tokenizers_to_which_a_cut_matters_get_their_texts_whole(tokens: Tokenizer) -> None:
    assert not can_be_cut(tokens)
