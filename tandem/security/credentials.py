"""TLS and tokens of one process for both directions, loaded from its options.

`Incoming` guards every port, `Outgoing` goes with every call. Empty ones stand for plain connections.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tandem.errors import ConfigError
from tandem.security.exposure import check_exposure, stays_on_this_machine
from tandem.security.options import ClientSecurityConfig, SecurityConfig
from tandem.security.tls import ClientTls, ServerTls
from tandem.security.tokens import Tokens


@dataclass(frozen=True, slots=True)
class Incoming:
    """What the ports of this process require of callers."""

    tls: ServerTls | None = None
    tokens: Tokens | None = None


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What this process shows to processes that are called from here."""

    tls: ClientTls | None = None
    tokens: Tokens | None = None
    insecure: bool = False
    """Whether the token may cross a network in clear."""

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """gRPC metadata of a call, with the present token."""
        return () if self.tokens is None else (("authorization", self.tokens.bearer()),)

    def shows_token_in_clear(self, target: str) -> bool:
        """Whether the token would cross a network on its way to `target`, and may not. May wait for a name server."""
        return self.tokens is not None and self.tls is None and not self.insecure and not stays_on_this_machine(target)

    @classmethod
    def of_client(cls, config: ClientSecurityConfig, target: str) -> Outgoing:
        """For a client. Raises ConfigError: bad files, or a token that would cross a network in clear."""
        if (config.tls_cert is None) != (config.tls_key is None):
            raise ConfigError("--tls-cert", "goes with --tls-key")
        tls = None
        if config.uses_tls:
            tls = ClientTls(config.tls_ca, config.tls_cert, config.tls_key, config.tls_server_name)
        tokens = None if config.token_file is None else Tokens(config.token_file)
        outgoing = cls(tls, tokens, config.insecure)
        if outgoing.shows_token_in_clear(target):
            raise ConfigError("--token-file", f"would cross the network to {target} in clear; give --tls or --insecure")
        return outgoing


@dataclass(frozen=True, slots=True)
class Security:
    """Credentials of a process, in both directions."""

    incoming: Incoming = Incoming()
    outgoing: Outgoing = Outgoing()

    @classmethod
    def load(
        cls,
        config: SecurityConfig,
        listens: Iterable[tuple[str, str | None]],
        calls: Iterable[tuple[str, str]] = (),
    ) -> Security:
        """Reads every file; `listens` are (option, HOST:PORT or None) of its ports, `calls` of processes it calls.

        Raises ConfigError: a bad file, options that do not go together, a port open to others unprotected, or a
        token that would cross a network in clear.
        """
        _check_together(config)
        check_exposure(config, listens)
        tokens = None if config.token_file is None else Tokens(config.token_file)
        server = client = None
        if config.tls_cert is not None and config.tls_key is not None:
            server = ServerTls(config.tls_cert, config.tls_key, config.tls_client_ca)
            client = ClientTls(config.tls_ca, config.tls_cert, config.tls_key, config.tls_server_name)
        outgoing = Outgoing(client, tokens, config.insecure)
        for option, target in calls:
            if outgoing.shows_token_in_clear(target):
                raise ConfigError(
                    option,
                    f"the token of --token-file would cross the network to {target} in clear: "
                    "give --tls-cert, --tls-key and --tls-ca, or else --insecure",
                )
        return cls(Incoming(server, tokens), outgoing)


def _check_together(config: SecurityConfig) -> None:
    """Every process both serves and calls: it needs a certificate, its key, and the authorities of the others."""
    trio = {"--tls-cert": config.tls_cert, "--tls-key": config.tls_key, "--tls-ca": config.tls_ca}
    missing = [option for option, value in trio.items() if value is None]
    if missing and len(missing) < len(trio):
        given = next(option for option, value in trio.items() if value is not None)
        raise ConfigError(missing[0], f"is missing; {given} was given, and {', '.join(trio)} go together")
    for option, value in {"--tls-client-ca": config.tls_client_ca, "--tls-server-name": config.tls_server_name}.items():
        if missing and value is not None:
            raise ConfigError(option, f"needs {', '.join(trio)}")
