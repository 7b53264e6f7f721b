"""HELLO: what each side says of itself, and the comparison that lets bytes move. Pure.

The sender speaks first, the receiver answers; both compare, so both can name what differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtransfer.base import Fingerprints
from kvtransfer.fields import decode_fields, encode_fields, required, required_int, with_prefix
from tandem.errors import FrameError, HandshakeMismatch
from tandem.types import Incarnation

_FINGERPRINT = "fingerprint."
_DETAIL = "detail."
ABSENT = "absent"
MAX_RANKS = 64
"""The most ranks of a worker."""


@dataclass(frozen=True, slots=True)
class Hello:
    """One side of the handshake. `transport` is how the payload travels on this connection."""

    incarnation: Incarnation
    transport: str
    num_blocks: int
    """Blocks of the speaker's pool."""
    verify: tuple[str, ...]
    """See `transport.Lane`."""
    fingerprints: tuple[tuple[str, str], ...]
    details: Mapping[str, str] = field(default_factory=dict)
    """See `transport.Lane`; never compared."""
    num_ranks: int = 1
    """Ranks that divide the speaker's pool; never compared."""

    def encode(self) -> bytes:
        """Payload of a HELLO frame."""
        fields = {
            "incarnation": str(self.incarnation),
            "transport": self.transport,
            "num_blocks": str(self.num_blocks),
            "verify": ",".join(self.verify),
        }
        if self.num_ranks > 1:
            fields["num_ranks"] = str(self.num_ranks)
        fields |= {_FINGERPRINT + name: value for name, value in self.fingerprints}
        return encode_fields(fields | {_DETAIL + name: value for name, value in self.details.items()})

    @classmethod
    def decode(cls, data: bytes) -> Hello:
        """Raises FrameError."""
        fields = decode_fields(data)
        incarnation = required(fields, "incarnation")
        if len(incarnation) != 32 or not incarnation.isalnum():
            raise FrameError("incarnation is not 32 characters")
        num_blocks = required_int(fields, "num_blocks", 2**32 - 1)
        if num_blocks == 0:
            raise FrameError("the peer's pool has no blocks")
        return cls(
            Incarnation(incarnation),
            required(fields, "transport"),
            num_blocks,
            tuple(filter(None, required(fields, "verify").split(","))),
            tuple(with_prefix(fields, _FINGERPRINT).items()),
            with_prefix(fields, _DETAIL),
            max(1, required_int({"num_ranks": "1"} | fields, "num_ranks", MAX_RANKS)),
        )


def fingerprint_fields(fingerprints: Fingerprints) -> tuple[tuple[str, str], ...]:
    """The model's fingerprint, then each dimension of the layout, by name."""
    return (("model", fingerprints.model), *fingerprints.layout.fields().items())


def compare(ours: Hello, theirs: Hello) -> None:
    """Raises HandshakeMismatch, naming the first field that differs."""
    if theirs.transport != ours.transport:
        raise HandshakeMismatch("transport", ours.transport, theirs.transport)
    if not set(ours.verify) & set(theirs.verify):
        raise HandshakeMismatch("verify", ",".join(ours.verify), ",".join(theirs.verify) or ABSENT)
    mine, other = dict(ours.fingerprints), dict(theirs.fingerprints)
    for name in [*mine, *(name for name in other if name not in mine)]:
        if mine.get(name) != other.get(name):
            raise HandshakeMismatch(name, mine.get(name, ABSENT), other.get(name, ABSENT))


def agreed_verify(sender: Hello, receiver: Hello) -> str:
    """How blocks are verified: the sender's best that the receiver can do too. Both passed `compare`."""
    return next(name for name in sender.verify if name in receiver.verify)
