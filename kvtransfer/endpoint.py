"""Where and how a receiving pool can be reached; opaque bytes to everybody in between. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtransfer.fields import decode_fields, encode_fields, required, required_int, with_prefix
from tandem.errors import FrameError
from tandem.types import Incarnation

ENDPOINT_VERSION = 3
"""1: first version. 2: says whether tcp is inside TLS. 3: each transport names its own fields, `TRANSPORT.NAME`."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What a life of a receiving pool says of its whereabouts."""

    incarnation: Incarnation
    reach: Mapping[str, Mapping[str, str]]
    """By transport, best first: the fields that its sender needs to dial (`transport.Acceptor.fields`)."""

    def encode(self) -> bytes:
        """Bytes for `Offer.endpoint`."""
        fields = {
            "endpoint_version": str(ENDPOINT_VERSION),
            "incarnation": self.incarnation,
            "transports": ",".join(self.reach),
        }
        for transport, reach in self.reach.items():
            fields |= {f"{transport}.{name}": value for name, value in reach.items()}
        return encode_fields(fields)

    @classmethod
    def decode(cls, data: bytes) -> Endpoint:
        """Raises FrameError."""
        fields = decode_fields(data)
        version = required_int(fields, "endpoint_version", 2**16)
        if version != ENDPOINT_VERSION:
            raise FrameError(f"endpoint has version {version}, not {ENDPOINT_VERSION}")
        transports = filter(None, required(fields, "transports").split(","))
        return cls(
            incarnation=Incarnation(required(fields, "incarnation")),
            reach={transport: with_prefix(fields, f"{transport}.") for transport in transports},
        )

    def replaces(self, other: Endpoint) -> bool:
        """Whether another life of a pool listens now where `other` did."""
        same_place = any(fields and self.reach.get(transport) == fields for transport, fields in other.reach.items())
        return same_place and self.incarnation != other.incarnation
