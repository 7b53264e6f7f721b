"""The options of security: one set for every process, one for whoever calls."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from tandem.option_values import text
from tandem.options import Section, option

_security = partial(option, Section.SECURITY)


def _file(name: str, description: str) -> Any:
    return _security(name, None, description, text(r".+", "a file", "FILE"), none_word="none")


def _server_name(description: str) -> Any:
    host = text(r"[\w.:-]{1,253}", "a host name", "HOST")
    return _security("tls-server-name", None, description, host, none_word="none")


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityConfig:
    """How a process shows who it is, and what it asks of others. Files are read again when they change."""

    tls_cert: str | None = _file("tls-cert", "certificate chain of this process, PEM; with it every port speaks TLS")
    tls_key: str | None = _file("tls-key", "private key of --tls-cert, PEM")
    tls_ca: str | None = _file(
        "tls-ca", "certificates that vouch for the processes that this one calls, PEM; goes with --tls-cert"
    )
    tls_server_name: str | None = _server_name(
        "name that certificates of called processes bear; their address, if not given"
    )
    tls_client_ca: str | None = _file(
        "tls-client-ca", "certificates that vouch for callers, PEM; with it callers must show one (mutual TLS)"
    )
    token_file: str | None = _file(
        "token-file", "bearer tokens, one a line: callers must bring one, this process brings the first"
    )
    insecure: bool = _security(
        "insecure",
        False,
        "listen beyond loopback without TLS, or without asking who calls, or bring a token there in clear",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSecurityConfig:
    """How a client connects."""

    tls: bool = _security("tls", False, "speak TLS; implied by --tls-ca and --tls-cert")
    tls_ca: str | None = _file(
        "tls-ca", "certificates that vouch for the server, PEM; the public authorities', if not given"
    )
    tls_server_name: str | None = _server_name("name that the server's certificate bears; its address, if not given")
    tls_cert: str | None = _file("tls-cert", "the client's own certificate chain, PEM")
    tls_key: str | None = _file("tls-key", "private key of --tls-cert, PEM")
    token_file: str | None = _file("token-file", "file whose first line is the bearer token to bring")
    insecure: bool = _security("insecure", False, "send the token in clear, even beyond loopback")

    @property
    def uses_tls(self) -> bool:
        """Whether connections are by TLS."""
        return self.tls or self.tls_ca is not None or self.tls_cert is not None


def client_side(config: SecurityConfig) -> ClientSecurityConfig:
    """How to call a process of this config, from its own machine: `tandem serve` looks at its router so."""
    shared = {each.name: getattr(config, each.name) for each in fields(ClientSecurityConfig) if each.name != "tls"}
    return ClientSecurityConfig(**shared)
