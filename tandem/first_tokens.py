"""The payload of a hand-off's COMMIT frame: what was drawn from the prompt's last token.

    version u8 = 3 · kind u8 · count u16 · entries, big-endian
        kind 0   count × (choice index u16 · token id u32)     the first token of each choice that has one
        kind 1   count × (token id u32 · log-probability f32)  the candidates of a beam search, best first
        kind 3   count × (choice index u16 · token id u32)     the next tokens of each choice, in its order

Written by the prefill worker (kind 3 by a decode worker that moves what it runs), read by the decode worker, opaque to
everything between. Kind 0 does not name a choice that is resumed among others: its tokens are known, and their KV is
computed where it decodes. Kind 2 was kind 3 without an index. Version 2 had no kinds.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from tandem.errors import FrameError
from tandem.types import Candidates, TokenId


@dataclass(frozen=True, slots=True)
class NextTokens:
    """What each choice of a running request has behind the fewest tokens that the reader knows of any; at least one."""

    by_choice: Mapping[int, tuple[TokenId, ...]]


FirstTokens: TypeAlias = Mapping[int, TokenId] | Candidates | NextTokens
"""Tokens by choice index, the first candidates of a beam search, or the tokens of choices that ran elsewhere."""

FIRST_TOKENS_VERSION = 3
_TOKENS, _CANDIDATES, _NEXT = 0, 1, 3
_HEAD = struct.Struct("!BBH")
_ENTRIES = {_TOKENS: struct.Struct("!HI"), _CANDIDATES: struct.Struct("!If"), _NEXT: struct.Struct("!HI")}


def encode_first_tokens(first: FirstTokens) -> bytes:
    """Raises FrameError if a number does not fit."""
    kind: int
    entries: Iterable[tuple[float, ...]]
    if isinstance(first, NextTokens):
        kind, entries = _NEXT, [(index, each) for index, ids in first.by_choice.items() for each in ids]
    else:
        kind, entries = (_TOKENS, first.items()) if isinstance(first, Mapping) else (_CANDIDATES, first)
    try:
        packed = [_ENTRIES[kind].pack(*entry) for entry in entries]
        return _HEAD.pack(FIRST_TOKENS_VERSION, kind, len(packed)) + b"".join(packed)
    except (struct.error, OverflowError) as error:
        raise FrameError(f"first tokens do not fit: {error}") from error


def decode_first_tokens(payload: bytes) -> FirstTokens:
    """The reverse.

    Raises FrameError on another version, an unknown kind, a wrong length, a choice or a candidate named twice,
    candidates that are none, out of order or without a finite log-probability, and no next token.
    """
    if len(payload) < _HEAD.size:
        raise FrameError(f"first-token payload of {len(payload)} bytes is too short")
    version, kind, count = _HEAD.unpack_from(payload)
    if version != FIRST_TOKENS_VERSION:
        raise FrameError(f"first-token payload has version {version}, not {FIRST_TOKENS_VERSION}")
    entry = _ENTRIES.get(kind)
    if entry is None:
        raise FrameError(f"first-token payload of unknown kind {kind}")
    if len(payload) != _HEAD.size + count * entry.size:
        raise FrameError(f"first-token payload of {len(payload)} bytes does not hold {count} entries")
    entries = tuple(entry.iter_unpack(payload[_HEAD.size :]))
    if kind == _NEXT:
        if not entries:
            raise FrameError("no next token")
        by_choice: dict[int, list[TokenId]] = {}
        for index, token_id in entries:
            by_choice.setdefault(index, []).append(token_id)
        return NextTokens({index: tuple(token_ids) for index, token_ids in by_choice.items()})
    if len({first for first, _ in entries}) != count:
        raise FrameError("first-token payload names a choice or a token twice")
    return dict(entries) if kind == _TOKENS else _checked(entries)


def _checked(candidates: Candidates) -> Candidates:
    logprobs = [logprob for _, logprob in candidates]
    if not logprobs or not all(map(math.isfinite, logprobs)) or logprobs != sorted(logprobs, reverse=True):
        raise FrameError("first candidates that are none, not finite or not in order")
    return candidates
