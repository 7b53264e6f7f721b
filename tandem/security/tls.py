"""TLS of one process: its files, and SSL contexts for what is not gRPC (the admin port, KV over tcp).

`ServerTls` is for ports, `ClientTls` for calls. Both check certificate, key and authorities when they are
read, so that a broken or half-written file never takes the place of a good one (see `watched`); what is
under way keeps what it began with. Knows no gRPC: `tandem.rpc.tls` makes gRPC's credentials of `pem`.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from tandem.errors import ConfigError
from tandem.security.certificate import grpc_speaks_key
from tandem.security.watched import Watched

HANDSHAKE_TIMEOUT_S = 5.0
"""Given to a caller to finish its TLS handshake; a silent one is cut off."""
_MIN_VERSION = ssl.TLSVersion.TLSv1_3


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


P = TypeVar("P", ServerPem, ClientPem)


@dataclass(frozen=True, slots=True)
class _Loaded(Generic[P]):
    pem: P
    context: ssl.SSLContext


class ServerTls:
    """What this process shows on its ports and, with `client_ca`, asks of callers (mutual TLS)."""

    def __init__(self, cert: str, key: str, client_ca: str | None = None) -> None:
        """Paths of PEM files. Raises ConfigError if one is no good."""
        self._cert = cert
        self._key = key
        self._client_ca = client_ca
        paths = tuple(path for path in (cert, key, client_ca) if path is not None)
        self._files = Watched("certificate", paths, partial(_load_server, cert, key, client_ca))

    @property
    def requires_client_certificate(self) -> bool:
        """Whether callers must show a certificate."""
        return self._client_ca is not None

    def pem(self) -> ServerPem:
        """The files as they are now; the same object as long as they do not change."""
        return self._files.get().pem

    def context(self) -> ssl.SSLContext:
        """For one handshake, of the files as they are now."""
        return self._files.get().context

    def serving_context(self) -> ssl.SSLContext:
        """For a server that keeps one context: each handshake uses the files as they are then."""
        context = _server_context(self._cert, self._key, self._client_ca)

        def switch(connection: ssl.SSLObject, server_name: str | None, initial: ssl.SSLContext) -> None:
            del server_name, initial
            connection.context = self.context()

        context.sni_callback = switch
        return context


class ClientTls:
    """What this process shows those it calls, and which authorities and name it expects of them."""

    def __init__(
        self, ca: str | None, cert: str | None = None, key: str | None = None, server_name: str | None = None
    ) -> None:
        """Paths of PEM files; without `ca`, the public authorities vouch. Raises ConfigError if one is no good."""
        self._server_name = server_name
        paths = tuple(path for path in (ca, cert, key) if path is not None)
        self._files = Watched("certificates for calls", paths, partial(_load_client, ca, cert, key))

    @property
    def server_name(self) -> str | None:
        """The name that called processes' certificates bear, where it is not their address."""
        return self._server_name

    def pem(self) -> ClientPem:
        """The files as they are now."""
        return self._files.get().pem

    def context(self) -> ssl.SSLContext:
        """For one handshake, of the files as they are now."""
        return self._files.get().context


def _load_server(cert: str, key: str, client_ca: str | None) -> _Loaded[ServerPem]:
    context = _server_context(cert, key, client_ca)
    authorities = None if client_ca is None else _read("--tls-client-ca", client_ca)
    return _Loaded(ServerPem(_read("--tls-cert", cert), _read("--tls-key", key), authorities), context)


def _load_client(ca: str | None, cert: str | None, key: str | None) -> _Loaded[ClientPem]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks certificate and name by default
    context.minimum_version = _MIN_VERSION
    authorities = None
    if ca is None:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    else:
        authorities = _read("--tls-ca", ca)
        _trust(context, "--tls-ca", ca, authorities)
    if cert is None or key is None:
        return _Loaded(ClientPem(None, None, authorities), context)
    pem = ClientPem(chain := _read("--tls-cert", cert), _read("--tls-key", key), authorities)
    _identify(context, cert, key)
    _check_key_algorithm(cert, chain)
    return _Loaded(pem, context)


def _server_context(cert: str, key: str, client_ca: str | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _MIN_VERSION
    context.num_tickets = 0  # a resumed session would not meet authorities that have changed since
    chain = _read("--tls-cert", cert)
    _read("--tls-key", key)
    _identify(context, cert, key)
    _check_key_algorithm(cert, chain)
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        _trust(context, "--tls-client-ca", client_ca, _read("--tls-client-ca", client_ca))
    return context


def _identify(context: ssl.SSLContext, cert: str, key: str) -> None:
    """Raises ConfigError unless both are PEM, belong together, and the key is not encrypted."""
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as error:
        raise ConfigError("--tls-cert", f"{cert} and {key} are no pair: {error.reason or 'not PEM'}") from error
    except OSError as error:
        raise ConfigError("--tls-cert", f"cannot read {cert} or {key}: {error.strerror}") from error


def _check_key_algorithm(path: str, chain: bytes) -> None:
    if not grpc_speaks_key(chain):
        raise ConfigError(
            "--tls-cert", f"the key of {path} is of a kind that gRPC does not speak; take RSA, P-256 or P-384"
        )


def _no_password() -> str:
    raise ConfigError("--tls-key", "the key is encrypted; there is nobody to ask for its password")


def _trust(context: ssl.SSLContext, option: str, path: str, pem: bytes) -> None:
    try:
        context.load_verify_locations(cadata=pem.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:  # the latter: empty, or not ASCII
        raise ConfigError(option, f"{path} holds no certificates in PEM") from error


def _read(option: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(option, f"cannot read {path}: {error.strerror}") from error
