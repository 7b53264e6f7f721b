"""The options of security: one set for every process, one for whoever calls."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.option_values import text
from tandem.options import option

_FILE = text(r".+", "a file")


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityConfig:
    """How a process shows who it is, and what it asks of others. Files are read again when they change."""

    tls_cert: str | None = option(
        "tls-cert",
        None,
        "certificate chain of this process, PEM; with it every port speaks TLS",
        _FILE,
        none_word="none",
    )
    tls_key: str | None = option("tls-key", None, "private key of --tls-cert, PEM", _FILE, none_word="none")
    tls_ca: str | None = option(
        "tls-ca", None, "certificates that vouch for the processes called, PEM", _FILE, none_word="none"
    )
    tls_server_name: str | None = option(
        "tls-server-name",
        None,
        "name that certificates of called processes bear; their address, if not given",
        text(r"[\w.:-]{1,253}", "a host name"),
        none_word="none",
    )
    tls_client_ca: str | None = option(
        "tls-client-ca",
        None,
        "certificates that vouch for callers, PEM; with it callers must show one (mutual TLS)",
        _FILE,
        none_word="none",
    )
    token_file: str | None = option(
        "token-file",
        None,
        "bearer tokens, one a line: callers must bring one, this process brings the first",
        _FILE,
        none_word="none",
    )
    insecure: bool = option("insecure", False, "listen beyond loopback without TLS and tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSecurityConfig:
    """How a client connects."""

    tls: bool = option("tls", False, "speak TLS; implied by --tls-ca")
    tls_ca: str | None = option(
        "tls-ca",
        None,
        "certificates that vouch for the server, PEM; the system's, if not given",
        _FILE,
        none_word="none",
    )
    tls_server_name: str | None = option(
        "tls-server-name",
        None,
        "name that the server's certificate bears; its address, if not given",
        text(r"[\w.:-]{1,253}", "a host name"),
        none_word="none",
    )
    tls_cert: str | None = option("tls-cert", None, "the client's own certificate chain, PEM", _FILE, none_word="none")
    tls_key: str | None = option("tls-key", None, "private key of --tls-cert, PEM", _FILE, none_word="none")
    token_file: str | None = option(
        "token-file", None, "file whose first line is the bearer token to bring", _FILE, none_word="none"
    )
