"""One frame of the control protocol: a fixed header, a bounded payload, a checksum over both.

Pure: bytes in, values out, no I/O and no knowledge of what payloads mean (see `messages`).
The header's layout up to `version` never changes, so that any two versions can tell each
other apart. Inline KV bytes follow a WRITE frame on connections that carry them; they belong
to no frame and are covered by the checksums that the frame holds.

    offset  0        4        5     6         8       12     16        24
            magic 4s version  type  reserved  length  seq    transfer  checksum
                     u8       u8    u16 = 0   u32     u32    u64       u64        little-endian
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import xxhash

from tandem.errors import FrameError, HandshakeMismatch

MAGIC = b"TKV\n"
PROTOCOL_VERSION = 2
"""1: first version. 2: HELLO says how blocks are verified; a WRITE counts positions from the sequence's first block."""

_PREFIX = struct.Struct("<4sBBHIIQ")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _PREFIX.size + _CHECKSUM.size
_TLS_HANDSHAKE = b"\x16\x03"


class FrameType(enum.IntEnum):
    """What a frame says; S = from the sender, R = from the receiver."""

    HELLO = 1
    """Both: who speaks, and every fingerprint."""
    OPEN = 2
    """S: shows a ticket."""
    OPEN_OK = 3
    """R: bytes may follow; grants the window."""
    REFUSED = 4
    """R: the ticket is not accepted."""
    WRITE = 5
    """S: these positions are written (or follow inline), with a checksum for each."""
    WRITE_OK = 6
    """R: WRITE number `seq` and every WRITE before are verified."""
    COMMIT = 7
    """S: everything is sent; nothing more will be written."""
    COMMITTED = 8
    """R: verified whole."""
    FAILED = 9
    """R: the COMMIT did not verify."""
    ABORT = 10
    """S: gives up, and has stopped writing."""
    WITHDRAWN = 11
    """R: the offer ended; stop writing and say DRAINED."""
    DRAINED = 12
    """S: has stopped writing for this transfer. R: took note of an ABORT."""
    HEARTBEAT = 13
    """Both: still here."""
    BYE = 14
    """S: has stopped all writing and closed its mapping; nothing follows."""


_SMALL = 16 * 1024
MAX_PAYLOAD_BYTES: Mapping[FrameType, int] = MappingProxyType(
    dict.fromkeys(FrameType, 0)
    | {
        FrameType.HELLO: _SMALL,
        FrameType.OPEN: 4 * 1024 * 1024,
        FrameType.OPEN_OK: _SMALL,
        FrameType.REFUSED: _SMALL,
        FrameType.WRITE: 64 * 1024,
        FrameType.COMMIT: 1024 * 1024,
        FrameType.FAILED: _SMALL,
        FrameType.WITHDRAWN: _SMALL,
    }
)
"""Longest payload of each type; checked before anything is allocated."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A whole frame. `transfer` is 0 where a frame concerns the connection."""

    type: FrameType
    transfer: int = 0
    seq: int = 0
    payload: bytes = b""

    def encode(self) -> bytes:
        """Header and payload. Raises FrameError if the payload is too long for its type."""
        _check_length(self.type, len(self.payload))
        prefix = _PREFIX.pack(MAGIC, PROTOCOL_VERSION, self.type, 0, len(self.payload), self.seq, self.transfer)
        return prefix + _CHECKSUM.pack(_checksum(prefix, self.payload)) + self.payload


@dataclass(frozen=True, slots=True)
class Header:
    """A header whose lengths are safe to act on; its checksum is not verified yet."""

    type: FrameType
    transfer: int
    seq: int
    length: int
    prefix: bytes
    checksum: int

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> Header:
        """Reads `HEADER_BYTES` bytes.

        Raises HandshakeMismatch on another protocol version, FrameError on anything else.
        """
        if len(data) != HEADER_BYTES:
            raise FrameError(f"header has {len(data)} bytes, not {HEADER_BYTES}")
        prefix = bytes(data[: _PREFIX.size])
        magic, version, kind, reserved, length, seq, transfer = _PREFIX.unpack(prefix)
        if magic != MAGIC:
            hint = "; the peer speaks TLS" if magic.startswith(_TLS_HANDSHAKE) else ""
            raise FrameError(f"bytes do not start with the protocol's magic{hint}")
        if version != PROTOCOL_VERSION:
            raise HandshakeMismatch("protocol_version", str(PROTOCOL_VERSION), str(version))
        if reserved != 0:
            raise FrameError(f"reserved bits are {reserved}, not 0")
        try:
            frame_type = FrameType(kind)
        except ValueError as error:
            raise FrameError(f"unknown frame type {kind}") from error
        _check_length(frame_type, length)
        (checksum,) = _CHECKSUM.unpack(data[_PREFIX.size :])
        return cls(frame_type, transfer, seq, length, prefix, checksum)

    def complete(self, payload: bytes) -> Frame:
        """The frame with its payload. Raises FrameError if lengths or checksum differ."""
        if len(payload) != self.length:
            raise FrameError(f"{self.type.name} has {len(payload)} payload bytes, not {self.length}")
        if _checksum(self.prefix, payload) != self.checksum:
            raise FrameError(f"{self.type.name} frame's checksum differs")
        return Frame(self.type, self.transfer, self.seq, payload)


def _check_length(frame_type: FrameType, length: int) -> None:
    limit = MAX_PAYLOAD_BYTES[frame_type]
    if length > limit:
        raise FrameError(f"{frame_type.name} payload of {length} bytes exceeds {limit}")


def _checksum(prefix: bytes, payload: bytes) -> int:
    return xxhash.xxh3_64_intdigest(prefix + payload)
