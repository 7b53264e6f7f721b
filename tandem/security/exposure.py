"""Which addresses other machines can reach, and what a process must have before it listens there.

Loopback needs nothing. Anything else needs TLS with tokens or with callers' certificates (mutual TLS), or `--insecure`,
said on purpose.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

from tandem.errors import ConfigError
from tandem.security.options import SecurityConfig


def check_exposure(config: SecurityConfig, listens: Iterable[tuple[str, str | None]]) -> None:
    """Raises ConfigError, naming the option, if one of (option, HOST:PORT or None) is open to others unprotected."""
    if config.insecure:
        return
    missing = [] if config.tls_cert is not None else ["--tls-cert, --tls-key and --tls-ca"]
    if config.token_file is None and config.tls_client_ca is None:
        missing.append("--token-file or --tls-client-ca")
    if not missing:
        return
    for option, address in listens:
        if address is not None and not is_loopback(address):
            raise ConfigError(
                option, f"other machines can reach {address}: give {' and '.join(missing)}, or else --insecure"
            )


def is_loopback(address: str) -> bool:
    """Whether HOST:PORT is this machine's own; a name that does not resolve is not."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the latter: a label that is too long
        return False
    return all(ipaddress.ip_address(str(each[4][0]).partition("%")[0]).is_loopback for each in found)


def stays_on_this_machine(target: str) -> bool:
    """Whether every address of a client's target, in gRPC's notation, is loopback."""
    scheme, _, rest = target.partition(":")
    match scheme:
        case "dns":
            return is_loopback(rest.rpartition("/")[2])
        case "ipv4" | "ipv6":
            return all(map(is_loopback, rest.split(",")))
    return is_loopback(target)
