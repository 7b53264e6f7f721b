"""Where a long text may be cut, so that its pieces give the same tokens as the whole.

Until it has a text's last token, a tokenizer holds many times the text's size in memory; of a text that is given to it
in pieces, as much for one piece. Texts are cut before a space that follows a printable ASCII character, and only for
pre-tokenizers whose expression is known (GPT-2's, Llama 3's, Qwen's): no alternative of theirs takes a space after
anything else, so one match ends and the next begins there in any case. Other tokenizers get their texts whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

_PIECE_CHARACTERS = 64 * 1024
_CUT = re.compile(r"[!-~](?= )")
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_EXPRESSIONS = frozenset(f"{_CONTRACTIONS}|{_WORDS}|{digits}|{_REST}" for digits in (r"\p{N}{1,3}", r"\p{N}"))


def can_be_cut(tokenizer: Tokenizer) -> bool:
    """Whether `pieces` may be used with it. Before the pre-tokenizer, too, nothing may reach across a cut."""
    normalizer = _settings(tokenizer.normalizer)
    if normalizer is not None and normalizer.get("type") != "NFC":  # a space is never composed with what is before it
        return False
    if any(token.rstrip or " " in token.content for token in tokenizer.get_added_tokens_decoder().values()):
        return False
    steps = _settings(tokenizer.pre_tokenizer) or {}
    if steps.get("type") != "Sequence":
        return _is_byte_level(steps, use_regex=True)
    match steps["pretokenizers"]:
        case [{"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}, last]:
            return expression in _EXPRESSIONS and _is_byte_level(last, use_regex=False)
    return False


def pieces(text: str) -> Iterator[str]:
    """The text in pieces of about 64 Ki characters; longer where there is no place to cut."""
    start = 0
    while start < len(text):
        cut = _CUT.search(text, start + _PIECE_CHARACTERS)
        end = len(text) if cut is None else cut.end()
        yield text[start:end]
        start = end


def _is_byte_level(step: dict[str, Any], *, use_regex: bool) -> bool:
    return step.get("type") == "ByteLevel" and not step["add_prefix_space"] and step["use_regex"] is use_regex


def _settings(part: Any) -> dict[str, Any] | None:
    """Of a normalizer or pre-tokenizer, as in tokenizer.json; None = there is none."""
    if part is None:
        return None
    settings: dict[str, Any] = json.loads(part.__getstate__())
    return settings
