"""What the payloads of frames mean. Pure: every decoder raises FrameError on bytes it cannot read."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import xxhash

from tandem.errors import (
    ChecksumMismatch,
    FrameError,
    PeerLost,
    Reason,
    TicketRefused,
    TransferError,
)

MAX_CHECKSUMS_PER_WRITE = 4096
"""The most checksums of a WRITE frame: one for each grain of its blocks."""
OUT_OF_MEMORY = "this host has no memory left for the hand-off"
_MAX_ERROR_BYTES = 4096
_WRITE = struct.Struct("<II")
_COMMIT = struct.Struct("<IQ")
_WINDOW = struct.Struct("<I")
_ERRORS: Mapping[str, type[TransferError]] = MappingProxyType(
    {
        Reason.TICKET_REFUSED: TicketRefused,
        Reason.CHECKSUM_MISMATCH: ChecksumMismatch,
        Reason.FRAME_ERROR: FrameError,
        Reason.PEER_LOST: PeerLost,
    }
)


@dataclass(frozen=True, slots=True)
class Write:
    """Positions `first, first+1, …` of the sequence's blocks, with the 8 bytes that verify each grain."""

    first: int
    checksums: tuple[int, ...]
    """Block by block, of each block grain by grain."""
    num_grains: int = 1
    """Grains of a block; see `plan`."""

    @property
    def num_blocks(self) -> int:
        """Positions written."""
        return len(self.checksums) // self.num_grains

    @property
    def end(self) -> int:
        """The position after the last position written."""
        return self.first + self.num_blocks

    def encode(self) -> bytes:
        """Payload of a WRITE frame."""
        return _WRITE.pack(self.first, self.num_blocks) + struct.pack(f"<{len(self.checksums)}Q", *self.checksums)

    @classmethod
    def decode(cls, data: bytes) -> Write:
        """Raises FrameError."""
        if len(data) < _WRITE.size:
            raise FrameError(f"WRITE of {len(data)} bytes is too short")
        first, n = _WRITE.unpack_from(data)
        num_checksums, rest = divmod(len(data) - _WRITE.size, 8)
        if rest or not 0 < n <= num_checksums <= MAX_CHECKSUMS_PER_WRITE or num_checksums % n:
            raise FrameError(f"WRITE of {len(data)} bytes does not hold checksums of {n} blocks")
        return cls(first, struct.unpack_from(f"<{num_checksums}Q", data, _WRITE.size), num_checksums // n)


@dataclass(frozen=True, slots=True)
class Commit:
    """How many WRITEs there were, the digest over all checksums, and what travels along."""

    num_writes: int
    digest: int
    first_token_payload: bytes

    def encode(self) -> bytes:
        """Payload of a COMMIT frame."""
        return _COMMIT.pack(self.num_writes, self.digest) + self.first_token_payload

    @classmethod
    def decode(cls, data: bytes) -> Commit:
        """Raises FrameError."""
        if len(data) < _COMMIT.size:
            raise FrameError(f"COMMIT of {len(data)} bytes is too short")
        num_writes, digest = _COMMIT.unpack_from(data)
        return cls(num_writes, digest, data[_COMMIT.size :])


def digest_of(checksums: Sequence[int] | npt.NDArray[np.uint64]) -> int:
    """xxh3-64 over the blocks' checksums in the offer's order, each a little-endian u64."""
    return xxhash.xxh3_64_intdigest(np.asarray(checksums, "<u8").tobytes())


def encode_window(num_writes: int) -> bytes:
    """Payload of OPEN_OK: WRITE frames that may be unanswered at a time."""
    return _WINDOW.pack(num_writes)


def decode_window(data: bytes) -> int:
    """The reverse. Raises FrameError."""
    if len(data) != _WINDOW.size:
        raise FrameError(f"window of {len(data)} bytes")
    (window,) = _WINDOW.unpack(data)
    if window < 1:
        raise FrameError("window is empty")
    return int(window)


def encode_error(error: TransferError) -> bytes:
    """Payload of REFUSED, FAILED and WITHDRAWN: reason, newline, message."""
    return f"{error.reason}\n{error.message}".encode()[:_MAX_ERROR_BYTES]


def decode_error(data: bytes) -> TransferError:
    """The error as the peer named it; an unknown reason becomes a plain TransferError."""
    reason, _, message = data[:_MAX_ERROR_BYTES].decode(errors="replace").partition("\n")
    return _ERRORS.get(reason, TransferError)(f"the peer says: {message}")
