"""HELLO: what each side says of itself, and the comparison that lets bytes move. Pure.

The sender speaks first, the receiver answers; both compare, so both can name what differs.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtransfer.base import Fingerprints
from kvtransfer.fields import decode_fields, encode_fields, required, required_int
from tandem.errors import FrameError, HandshakeMismatch
from tandem.types import Incarnation

_FINGERPRINT = "fingerprint."
ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Hello:
    """One side of the handshake. `transport` is how the payload travels on this connection."""

    incarnation: Incarnation
    transport: str
    num_blocks: int
    """Blocks of the speaker's pool."""
    fingerprints: tuple[tuple[str, str], ...]

    def encode(self) -> bytes:
        """Payload of a HELLO frame."""
        fields = {
            "incarnation": str(self.incarnation),
            "transport": self.transport,
            "num_blocks": str(self.num_blocks),
        }
        return encode_fields(fields | {_FINGERPRINT + name: value for name, value in self.fingerprints})

    @classmethod
    def decode(cls, data: bytes) -> Hello:
        """Raises FrameError."""
        fields = decode_fields(data)
        fingerprints = tuple(
            (name.removeprefix(_FINGERPRINT), value) for name, value in fields.items() if name.startswith(_FINGERPRINT)
        )
        incarnation = required(fields, "incarnation")
        if len(incarnation) != 32 or not incarnation.isalnum():
            raise FrameError("incarnation is not 32 characters")
        return cls(
            Incarnation(incarnation),
            required(fields, "transport"),
            required_int(fields, "num_blocks", 2**32 - 1),
            fingerprints,
        )


def fingerprint_fields(fingerprints: Fingerprints) -> tuple[tuple[str, str], ...]:
    """The model's fingerprint, then each dimension of the layout, by name."""
    return (("model", fingerprints.model), *fingerprints.layout.fields().items())


def compare(ours: Hello, theirs: Hello) -> None:
    """Raises HandshakeMismatch, naming the first field that differs."""
    if theirs.transport != ours.transport:
        raise HandshakeMismatch("transport", ours.transport, theirs.transport)
    mine, other = dict(ours.fingerprints), dict(theirs.fingerprints)
    for name in [*mine, *(name for name in other if name not in mine)]:
        if mine.get(name) != other.get(name):
            raise HandshakeMismatch(name, mine.get(name, ABSENT), other.get(name, ABSENT))
