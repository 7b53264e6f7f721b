"""A checkpoint's tokenizer: tokenizer.json, and the tokens that only tokenizer_config.json adds; or a GGUF file's own.

Such tokens (`added_tokens_decoder`) are what fine-tunes often add; without them a prompt is split in another way.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from models.files.gguf import read_gguf
from models.files.gguf_tokenizer import gguf_tokenizer, gguf_tokens
from models.files.model_path import missing_tokenizer
from tandem.errors import CheckpointError

TOKENIZER_FILE = "tokenizer.json"
_CONFIG_FILE = "tokenizer_config.json"
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")


def read_tokenizer(folder: Path) -> Tokenizer:
    """Reads both files, or the GGUF file that is named in place of a folder. Raises CheckpointError naming the file."""
    if folder.is_file():
        return gguf_tokenizer(read_gguf(folder))
    file = folder / TOKENIZER_FILE
    if not file.exists():
        raise CheckpointError(missing_tokenizer(folder))
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exceptions
        raise CheckpointError(f"{file}: not a tokenizer: {error}: download it again") from error
    for token_id, token in _added_tokens(folder):
        if tokenizer.token_to_id(token.content) is None:
            tokenizer.add_tokens([token])
        if tokenizer.token_to_id(token.content) != token_id:
            config = folder / _CONFIG_FILE
            raise CheckpointError(f"{config}: added_tokens_decoder: {token.content!r} cannot have id {token_id}")
    return tokenizer


def find_tokens(folder: Path, names: Collection[str]) -> frozenset[int]:
    """Ids of these tokens, of those that there are. Reads tokenizer.json only for what the other file does not tell."""
    ids = {token.content: token_id for token_id, token in _added_tokens(folder)}
    if folder.is_file():
        ids = {token: token_id for token_id, token in enumerate(gguf_tokens(read_gguf(folder)))} if names else {}
    elif not ids.keys() >= set(names) and (folder / TOKENIZER_FILE).exists():
        ids = read_tokenizer(folder).get_vocab()
    return frozenset(ids[name] for name in names if name in ids)


def _added_tokens(folder: Path) -> list[tuple[int, AddedToken]]:
    """Returns added tokens by ascending id: the order in which a tokenizer must add them to give the same ids."""
    config = folder / _CONFIG_FILE
    if not config.exists():
        return []
    try:
        added: dict[str, dict[str, Any]] = json.loads(config.read_text(encoding="utf-8")).get("added_tokens_decoder")
        tokens = [
            (int(token_id), AddedToken(str(token["content"]), **{flag: bool(token.get(flag)) for flag in _FLAGS}))
            for token_id, token in (added or {}).items()
        ]
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise CheckpointError(f"{config}: added_tokens_decoder cannot be read: {error!r}") from error
    return sorted(tokens, key=lambda each: each[0])
