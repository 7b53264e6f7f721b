"""The payload of a hand-off's COMMIT frame: the first token, as four big-endian bytes.

Written by the prefill worker, read by the decode worker, opaque to everything between.
The length is the version: other lengths are free for other payloads and refused here.
"""

from __future__ import annotations

import struct

from tandem.errors import FrameError
from tandem.types import TokenId

_TOKEN = struct.Struct("!I")


def encode_first_token(token_id: TokenId) -> bytes:
    """Four bytes. Raises FrameError if the id does not fit an unsigned 32-bit integer."""
    try:
        return _TOKEN.pack(token_id)
    except struct.error as error:
        raise FrameError(f"first token id {token_id} does not fit 32 bits") from error


def decode_first_token(payload: bytes) -> TokenId:
    """The reverse. Raises FrameError unless there are exactly four bytes."""
    if len(payload) != _TOKEN.size:
        raise FrameError(f"first-token payload has {len(payload)} bytes, not {_TOKEN.size}")
    (token_id,) = _TOKEN.unpack(payload)
    return TokenId(token_id)
