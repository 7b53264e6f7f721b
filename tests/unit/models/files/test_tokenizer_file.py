"""Tokens that only tokenizer_config.json adds are tokens, as for transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

from models.files.tokenizer_file import read_tokenizer
from tandem.errors import CheckpointError

ADDED = {"content": "<tool>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}


def write(folder: Path, added: dict[str, object]) -> Path:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_an_added_token_is_not_split(tmp_path: Path) -> None:
    folder = write(tmp_path, {"4": ADDED | {"content": "<end>"}, "3": ADDED | {"special": True}})
    tokenizer = read_tokenizer(folder)
    text = "a <tool>b<end>"
    assert tokenizer.encode(text).ids == [0, 3, 1, 4]
    assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] == [0, 3, 1, 4]
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    assert special == {3}


@pytest.mark.parametrize("added", [{"9": ADDED}, {"x": ADDED}, {"3": {}}, [1]])
def test_what_cannot_be_added_is_refused(tmp_path: Path, added: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="added_tokens_decoder"):
        read_tokenizer(write(tmp_path, added))
