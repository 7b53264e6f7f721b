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
        "tls-ca",
        None,
        "certificates that vouch for the processes that this one calls, PEM; goes with --tls-cert",
        _FILE,
        none_word="none",
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
    insecure: bool = option(
        "insecure", False, "listen beyond loopback without TLS and tokens, or bring a token there in clear"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSecurityConfig:
    """How a client connects."""

    tls: bool = option("tls", False, "speak TLS; implied by --tls-ca and --tls-cert")
    tls_ca: str | None = option(
        "tls-ca",
        None,
        "certificates that vouch for the server, PEM; the public authorities', if not given",
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
    insecure: bool = option("insecure", False, "send the token in clear, even beyond loopback")

    @property
    def uses_tls(self) -> bool:
        """Whether connections are by TLS."""
        return self.tls or self.tls_ca is not None or self.tls_cert is not None


def client_side(config: SecurityConfig) -> ClientSecurityConfig:
    """How to call a process of this config, from its own machine: `tandem serve` looks at its router so."""
    return ClientSecurityConfig(
        tls_ca=config.tls_ca,
        tls_server_name=config.tls_server_name,
        tls_cert=config.tls_cert,
        tls_key=config.tls_key,
        token_file=config.token_file,
        insecure=config.insecure,
    )
