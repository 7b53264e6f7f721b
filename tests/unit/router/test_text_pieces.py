from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from router import tokenization
from router.tokenization import Tokenization, can_be_cut, pieces

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
    text = "the little dog ran home " * 20_000

    assert max(map(len, pieces(text))) < 66_000
    assert list(pieces("x" * 200_000)) == ["x" * 200_000]


async def test_special_tokens_stand_around_the_whole_text() -> None:
    tokens = tokenizer()
    tokens.post_processor = processors.TemplateProcessing(single="<|pad|> $A <|pad|>", special_tokens=[("<|pad|>", 0)])
    text = "the little dog ran home " * 20_000

    served = Tokenization(tokens, None)
    try:
        assert list(await served.encode_text(text)) == tokens.encode(text).ids
    finally:
        served.close()


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
