"""Bytes that are nearly right: what a broken or hostile peer might say of a frame, a ticket, an endpoint, a handshake.

Pure and drawn from one `random.Random`, so that a case can be drawn again. Used by `tests.fuzz.transfer` and its tests.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping

import xxhash

from kvtransfer.base import BlockRef, BlockRefs
from kvtransfer.endpoint import Endpoint
from kvtransfer.fields import decode_fields
from kvtransfer.frame import HEADER_BYTES, Frame, FrameType, Header
from kvtransfer.handshake import Hello
from kvtransfer.messages import Commit, Write, decode_error, decode_window, encode_error, encode_window
from kvtransfer.ticket import Ticket
from tandem.errors import PeerLost
from tandem.first_tokens import decode_first_tokens, encode_first_tokens
from tandem.types import BlockId, Incarnation, TokenId

EDGES = (
    0,
    1,
    2,
    255,
    4095,
    4096,
    4097,
    2**15,
    2**16 - 1,
    2**18,
    2**18 + 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63,
    2**64 - 1,
)
"""Numbers at which something ends."""
WORDS: tuple[str, ...] = (
    *("", "0", "-1", "1e9", "٣", "16", "65536", "4294967295", "99999999999999999999", "127.0.0.1", "::", "on", "off"),
    *("shm", "tcp", "auto", ",", "=", ".", "..", "/", "\0", "\x7f", "é", "a" * 107, "a" * 300, "xxh3-64", "ab" * 16),
)
"""Values for a named field."""


def near(rng: random.Random, data: bytes) -> bytes:
    """`data`, or something near it, or nothing like it."""
    out = bytearray(data)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 5))):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(6):
            case 0 if out:
                out[at % len(out)] ^= 1 << rng.randrange(8)
            case 1:
                del out[at:]
            case 2:
                out[at:at] = rng.randbytes(rng.randrange(1, 40))
            case 3:
                span = rng.choice((1, 2, 4, 8))
                out[at : at + span] = (rng.choice(EDGES) % 256**span).to_bytes(span, "little")
            case 4:
                out[at:at] = out[: rng.randrange(len(out) + 1)]
            case 5 if rng.random() < 0.1:
                out = bytearray(rng.randbytes(rng.randrange(200)))
    return bytes(out[:20_000])


def near_fields(rng: random.Random, data: bytes) -> bytes:
    """Named values, some of them changed, missing, repeated or foreign; sometimes just bytes."""
    if rng.random() < 0.2:
        return near(rng, data)
    lines = data.decode(errors="replace").split("\n")
    for _ in range(rng.choice((0, 1, 1, 2))):
        at = rng.randrange(len(lines)) if lines else 0
        name = lines[at].partition("=")[0] if lines else "x"
        match rng.randrange(4):
            case 0 if lines:
                lines[at] = f"{name}={rng.choice(WORDS)}"
            case 1 if lines:
                del lines[at]
            case 2:
                lines.insert(at, f"{name}{rng.choice(('', 'x', '.'))}={rng.choice(WORDS)}")
            case 3 if lines:
                lines[at] = f"{name}={rng.choice(EDGES)}"
    return "\n".join(lines).encode()


def near_frame(rng: random.Random, frame: Frame) -> bytes:
    """A frame whose payload is near `frame`'s under a true checksum, or one that is broken itself."""
    change = near_fields if frame.type is FrameType.HELLO else near
    payload = change(rng, frame.payload) if rng.random() < 0.6 else frame.payload
    transfer = frame.transfer if rng.random() < 0.8 else rng.choice(EDGES)
    seq = frame.seq if rng.random() < 0.8 else rng.choice(EDGES) % 2**32
    kind = frame.type if rng.random() < 0.8 else rng.randrange(16)
    length = len(payload) if rng.random() < 0.9 else rng.choice(EDGES) % 2**32
    prefix = struct.pack("<4sBBHIIQ", b"TKV\n", 2, kind, 0, length, seq, transfer)
    data = prefix + struct.pack("<Q", xxhash.xxh3_64_intdigest(prefix + payload)) + payload
    return data if rng.random() < 0.8 else near(rng, data)


def _read_frame(data: bytes) -> object:
    return Header.decode(data[:HEADER_BYTES]).complete(data[HEADER_BYTES:])


_LIFE = Incarnation("ab" * 16)
_TICKET = Ticket(
    7, _LIFE, bytes(16), "cd" * 16, 5000, 1, BlockRefs.of([BlockRef(BlockId(3), 7), BlockRef(BlockId(1), 8)])
).encode()
_HELLO = Hello(_LIFE, "tcp", 16, ("xxh3-64",), (("model", "m"), ("dtype", "bfloat16")), {"key": "value"}).encode()
_ENDPOINT = Endpoint(_LIFE, {"shm": {"unix_name": "n", "uid": "0"}, "tcp": {"host": "::1", "port": "9"}}).encode()
DECODERS: Mapping[str, tuple[Callable[[bytes], object], bytes]] = {
    "frame": (_read_frame, Frame(FrameType.OPEN, 7, payload=_TICKET).encode()),
    "fields": (decode_fields, _ENDPOINT),
    "hello": (Hello.decode, _HELLO),
    "endpoint": (Endpoint.decode, _ENDPOINT),
    "ticket": (Ticket.decode, _TICKET),
    "write": (Write.decode, Write(3, (1, 2**64 - 1)).encode()),
    "commit": (Commit.decode, Commit(2, 9, b"payload").encode()),
    "window": (decode_window, encode_window(16)),
    "error": (decode_error, encode_error(PeerLost("gone"))),
    "first tokens": (decode_first_tokens, encode_first_tokens({0: TokenId(5), 3: TokenId(9)})),
    "candidates": (decode_first_tokens, encode_first_tokens(((TokenId(5), -0.5), (TokenId(6), -1.5)))),
}
"""All that reads a peer's bytes, with bytes that it can read."""


def near_decoder(rng: random.Random, name: str) -> bytes:
    """Bytes for the decoder of this name."""
    data = DECODERS[name][1]
    return near_fields(rng, data) if name in ("fields", "hello", "endpoint") else near(rng, data)
