"""TLS of one process: its files, and SSL contexts for what is not gRPC (the admin port, KV over tcp).

`ServerTls` is for ports, `ClientTls` for calls. Both check certificate, key and authorities when they are
read, so that a broken or half-written file never takes the place of a good one (see `watched`); what is
under way keeps what it began with. Knows no gRPC: `tandem.rpc.tls` makes gRPC's credentials of `pem`.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from tandem.errors import ConfigError
from tandem.security.certificate import grpc_speaks_key
from tandem.security.watched import Watched

HANDSHAKE_TIMEOUT_S = 5.0
"""Given to a caller to finish its TLS handshake; a silent one is cut off."""


@dataclass(frozen=True, slots=True)
class ServerPem:
    """A port's files as read. `client_authorities` vouch for callers."""

    chain: bytes
    key: bytes
    client_authorities: bytes | None


@dataclass(frozen=True, slots=True)
class ClientPem:
    """A caller's files as read. `authorities` vouch for those called; None = the public ones."""

    chain: bytes | None
    key: bytes | None
    authorities: bytes | None


P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class _Loaded(Generic[P]):
    pem: P
    context: ssl.SSLContext


class _Tls(Generic[P]):
    """Files of a direction."""

    def __init__(self, what: str, paths: Iterable[str | None], load: Callable[[], _Loaded[P]]) -> None:
        self._load = load
        self._files = Watched(what, tuple(path for path in paths if path is not None), load)

    def pem(self) -> P:
        """The files as they are now; the same object as long as they do not change."""
        return self._files.get().pem

    def context(self) -> ssl.SSLContext:
        """Returns the context of a handshake, from the present files."""
        return self._files.get().context


class ServerTls(_Tls[ServerPem]):
    """What this process shows on its ports and, with `client_ca`, asks of callers (mutual TLS)."""

    def __init__(self, cert: str, key: str, client_ca: str | None = None) -> None:
        """Takes paths of PEM files. Raises ConfigError if a file cannot be used."""
        self.requires_client_certificate = client_ca is not None
        super().__init__("certificate", (cert, key, client_ca), partial(_load_server, cert, key, client_ca))

    def serving_context(self) -> ssl.SSLContext:
        """For a server that keeps one context: each handshake uses the files as they are then."""
        context = self._load().context

        def switch(connection: ssl.SSLObject, server_name: str | None, initial: ssl.SSLContext) -> None:
            del server_name, initial
            connection.context = self.context()

        context.sni_callback = switch
        return context


class ClientTls(_Tls[ClientPem]):
    """What this process shows those it calls, and which authorities and name it expects of them."""

    def __init__(
        self, ca: str | None, cert: str | None = None, key: str | None = None, server_name: str | None = None
    ) -> None:
        """Paths of PEM files; without `ca`, the public authorities vouch. Raises ConfigError if one is no good.

        `server_name` is the name that called processes' certificates bear, where it is not their address.
        """
        self.server_name = server_name
        super().__init__("certificates for calls", (ca, cert, key), partial(_load_client, ca, cert, key))


def _load_server(cert: str, key: str, client_ca: str | None) -> _Loaded[ServerPem]:
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # a resumed session would not meet authorities that have changed since
    chain, key_pem = _identify(context, cert, key)
    authorities = None
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        authorities = _trust(context, "--tls-client-ca", client_ca)
    return _Loaded(ServerPem(chain, key_pem, authorities), context)


def _load_client(ca: str | None, cert: str | None, key: str | None) -> _Loaded[ClientPem]:
    context = _context(ssl.PROTOCOL_TLS_CLIENT)  # checks certificate and name by default
    authorities = None
    if ca is None:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    else:
        authorities = _trust(context, "--tls-ca", ca)
    chain, key_pem = (None, None) if cert is None or key is None else _identify(context, cert, key)
    return _Loaded(ClientPem(chain, key_pem, authorities), context)


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _identify(context: ssl.SSLContext, cert: str, key: str) -> tuple[bytes, bytes]:
    """Chain and key as read. Raises ConfigError unless both are PEM, belong together, and gRPC can use the key."""
    chain, key_pem = _read("--tls-cert", cert), _read("--tls-key", key)
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as error:
        raise ConfigError("--tls-cert", f"{cert} and {key} are no pair: {error.reason or 'not PEM'}") from error
    except OSError as error:
        raise ConfigError("--tls-cert", f"cannot read {cert} or {key}: {error.strerror}") from error
    if not grpc_speaks_key(chain):
        raise ConfigError(
            "--tls-cert", f"the key of {cert} is of a kind that gRPC does not speak; take RSA, P-256 or P-384"
        )
    return chain, key_pem


def _no_password() -> str:
    raise ConfigError("--tls-key", "the key is encrypted; there is nobody to ask for its password")


def _trust(context: ssl.SSLContext, option: str, path: str) -> bytes:
    """The authorities as read."""
    pem = _read(option, path)
    try:
        context.load_verify_locations(cadata=pem.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:  # the latter: empty, or not ASCII
        raise ConfigError(option, f"{path} holds no certificates in PEM") from error
    return pem


def _read(option: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(option, f"cannot read {path}: {error.strerror}") from error
