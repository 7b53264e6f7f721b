"""The payload of a hand-off's COMMIT frame: the first token of each choice that has one.

    version u8 = 2 · count u16 · count × (choice index u16 · token id u32), big-endian

Written by the prefill worker, read by the decode worker, opaque to everything between. A choice that
is resumed among others is not named: its tokens are known, and their KV is computed where it decodes.
Version 1 was the four bytes of one token id.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from tandem.errors import FrameError
from tandem.types import TokenId

FIRST_TOKENS_VERSION = 2
_HEAD = struct.Struct("!BH")
_ENTRY = struct.Struct("!HI")


def encode_first_tokens(tokens: Mapping[int, TokenId]) -> bytes:
    """`tokens` by choice index. Raises FrameError if an index or an id does not fit."""
    try:
        entries = [_ENTRY.pack(index, token_id) for index, token_id in tokens.items()]
        return _HEAD.pack(FIRST_TOKENS_VERSION, len(entries)) + b"".join(entries)
    except struct.error as error:
        raise FrameError(f"first tokens do not fit: {error}") from error


def decode_first_tokens(payload: bytes) -> dict[int, TokenId]:
    """The reverse. Raises FrameError on another version, a wrong length, or a choice named twice."""
    if len(payload) < _HEAD.size:
        raise FrameError(f"first-token payload of {len(payload)} bytes is too short")
    version, count = _HEAD.unpack_from(payload)
    if version != FIRST_TOKENS_VERSION:
        raise FrameError(f"first-token payload has version {version}, not {FIRST_TOKENS_VERSION}")
    if len(payload) != _HEAD.size + count * _ENTRY.size:
        raise FrameError(f"first-token payload of {len(payload)} bytes does not hold {count} tokens")
    tokens = {index: TokenId(token_id) for index, token_id in _ENTRY.iter_unpack(payload[_HEAD.size :])}
    if len(tokens) != count:
        raise FrameError("first-token payload names a choice twice")
    return tokens
