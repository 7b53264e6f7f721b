"""Certificates and tokens for tests: an authority, what it issues, and files that processes read."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from pathlib import Path

import trustme

from tandem.security.options import ClientSecurityConfig, SecurityConfig
from tandem.security.tls import ClientTls, ServerTls

TOKEN = "a-token-for-tests-0001"
OTHER_TOKEN = "a-token-for-tests-0002"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate chain with its key, as files."""

    cert: str
    key: str

    def show(self, other: Identity) -> None:
        """Puts the other's files in the place of these, each at one stroke, as a rotation does."""
        for ours, theirs in ((self.cert, other.cert), (self.key, other.key)):
            replace_by_copy(ours, theirs)


class Pki:
    """One authority and its files in `folder`."""

    def __init__(self, folder: Path, name: str = "own") -> None:
        self._folder = folder
        self._name = name
        self._authority = trustme.CA()
        self._issued = 0
        self.ca = self._path("ca.pem")
        self._authority.cert_pem.write_to_path(self.ca)

    def issue(self, *names: str, days: int = 1) -> Identity:
        """A certificate for these names (127.0.0.1 if none); fewer than 0 days = one that has expired."""
        now = datetime.datetime.now(datetime.UTC)
        issued = self._authority.issue_cert(
            *(names or (LOOPBACK,)),
            not_before=now - datetime.timedelta(days=30),
            not_after=now + datetime.timedelta(days=days),
        )
        self._issued += 1
        identity = Identity(self._path(f"{self._issued}.crt"), self._path(f"{self._issued}.key"))
        Path(identity.cert).write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(identity.key)
        return identity

    def tokens(self, *tokens: str) -> str:
        """A file with these tokens."""
        path = self._path("tokens")
        Path(path).write_text("# of a test\n\n" + "".join(f"{token}\n" for token in tokens or (TOKEN,)))
        return path

    def server(self, identity: Identity, *, mutual: bool = False) -> ServerTls:
        """What a port shows."""
        return ServerTls(identity.cert, identity.key, self.ca if mutual else None)

    def caller(self, identity: Identity | None = None, server_name: str | None = None) -> ClientTls:
        """What a caller shows, who takes this authority's word."""
        if identity is None:
            return ClientTls(self.ca, server_name=server_name)
        return ClientTls(self.ca, identity.cert, identity.key, server_name)

    def process(self, identity: Identity, *, mutual: bool = False, tokens: str | None = None) -> SecurityConfig:
        """The options of a process."""
        return SecurityConfig(
            tls_cert=identity.cert,
            tls_key=identity.key,
            tls_ca=self.ca,
            tls_client_ca=self.ca if mutual else None,
            token_file=tokens,
        )

    def client(self, identity: Identity | None = None, tokens: str | None = None) -> ClientSecurityConfig:
        """The options of a client."""
        return ClientSecurityConfig(
            tls_ca=self.ca,
            tls_cert=None if identity is None else identity.cert,
            tls_key=None if identity is None else identity.key,
            token_file=tokens,
        )

    def _path(self, name: str) -> str:
        return str(self._folder / f"{self._name}-{name}")


def replace_file(path: str, content: bytes) -> None:
    """At one stroke: whoever reads sees the old file or the new one."""
    new = Path(f"{path}.new")
    new.write_bytes(content)
    os.replace(new, path)


def replace_by_copy(path: str, other: str) -> None:
    """At one stroke, by what lies at `other`."""
    replace_file(path, Path(other).read_bytes())
