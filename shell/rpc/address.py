"""The addresses at which a process is reached by others, from its options and the ports that were bound."""

from __future__ import annotations

import errno
import ipaddress
import socket

_LOOPBACK = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
_WILDCARDS = frozenset({"0.0.0.0", "[::]", "*"})


def advertised_address(listen: str, advertise: str | None, bound_port: int) -> str:
    """`HOST:PORT` at which this process is reached.

    `advertise` wins; its port 0 means the bound one. Without it the host is that of `listen`,
    or what others call this machine where `listen` is a wildcard.
    """
    host, _, port = (advertise or listen).rpartition(":")
    if advertise is not None and int(port) != 0:
        return advertise
    return f"{_own_host() if host in _WILDCARDS else host}:{bound_port}"


def advertised_admin_address(listen: str, advertise: str | None, bound_port: int) -> str:
    """`HOST:PORT` at which the admin port is reached, which listens on `listen`.

    Where that is a wildcard, the host is that of `advertise`, whose port is the gRPC port's and is not used.
    """
    host = listen.rpartition(":")[0]
    if advertise is None or host not in _WILDCARDS:
        return advertised_address(listen, None, bound_port)
    return f"{advertise.rpartition(':')[0]}:{bound_port}"


def _own_host() -> str:
    """Returns the address of this machine's name, or the name where its address is unknown or on loopback.

    A container's name is known to its own hosts file alone.
    """
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return name
    return name if ipaddress.ip_address(address).is_loopback else address


def local_address(address: str) -> str:
    """Where this machine reaches a server that listens on `address`, which may be a wildcard."""
    host, _, port = address.rpartition(":")
    return f"{_LOOPBACK.get(host, host)}:{port}"


def is_taken(listen: str, *, shared: bool) -> bool:
    """Whether another process listens on `HOST:PORT`; `shared`: without sharing it with others that do."""
    host, _, port = listen.rpartition(":")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            probe.bind(address)
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False
