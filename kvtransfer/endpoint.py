"""Where and how a receiving pool can be reached; opaque bytes to everybody in between. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvtransfer.fields import decode_fields, encode_fields, required, required_int
from tandem.errors import FrameError
from tandem.types import Incarnation

ENDPOINT_VERSION = 2
"""1: first version. 2: says whether tcp is inside TLS."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`boot_id` and `uid` say who may share memory; addresses are empty where not offered."""

    incarnation: Incarnation
    boot_id: str
    uid: int
    transports: tuple[str, ...]
    unix_name: str = ""
    """Name in the abstract Unix namespace, without its leading NUL."""
    tcp_host: str = ""
    tcp_port: int = 0
    tls: bool = False
    """Whether connections over tcp are inside TLS."""

    def encode(self) -> bytes:
        """Bytes for `Offer.endpoint`."""
        return encode_fields(
            {
                "endpoint_version": str(ENDPOINT_VERSION),
                "incarnation": self.incarnation,
                "boot_id": self.boot_id,
                "uid": str(self.uid),
                "transports": ",".join(self.transports),
                "unix_name": self.unix_name,
                "tcp_host": self.tcp_host,
                "tcp_port": str(self.tcp_port),
                "tls": str(int(self.tls)),
            }
        )

    @classmethod
    def decode(cls, data: bytes) -> Endpoint:
        """Raises FrameError."""
        fields = decode_fields(data)
        version = required_int(fields, "endpoint_version", 2**16)
        if version != ENDPOINT_VERSION:
            raise FrameError(f"endpoint has version {version}, not {ENDPOINT_VERSION}")
        return cls(
            incarnation=Incarnation(required(fields, "incarnation")),
            boot_id=required(fields, "boot_id"),
            uid=required_int(fields, "uid", 2**32 - 1),
            transports=tuple(filter(None, required(fields, "transports").split(","))),
            unix_name=required(fields, "unix_name"),
            tcp_host=required(fields, "tcp_host"),
            tcp_port=required_int(fields, "tcp_port", 2**16 - 1),
            tls=required_int(fields, "tls", 1) == 1,
        )
