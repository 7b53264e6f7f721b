from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from router import text_pieces
from router.text_pieces import can_be_cut, pieces
from router.tokenization import Tokenization

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


@pytest.mark.parametrize("expression", [None, LLAMA_3, LLAMA_3.replace("{1,3}", "")], ids=["gpt-2", "llama-3", "qwen"])
@given(text=TEXT)
def test_pieces_give_the_tokens_of_the_whole(expression: str | None, text: str) -> None:
    tokens = tokenizer(expression)
    assert can_be_cut(tokens)
    whole = tokens.encode(text, add_special_tokens=False).ids

    for length in (0, 3, 10):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(text_pieces, "_PIECE_CHARACTERS", length)
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


def test_other_tokenizers_are_left_alone() -> None:
    others = [Tokenizer(models.BPE()), tokenizer(LLAMA_3.replace("'s|", "")), tokenizer(), tokenizer(), tokenizer()]
    others[2].normalizer = normalizers.Prepend("_")
    others[3].add_tokens([AddedToken("dog ran")])
    others[4].add_tokens([AddedToken("<x>", rstrip=True)])

    assert not any(map(can_be_cut, others))
