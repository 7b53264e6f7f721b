"""The address that a worker tells routers, from what it was told and what it listens on."""

from __future__ import annotations

import socket

_WILDCARDS = frozenset({"0.0.0.0", "[::]", "*"})


def is_wildcard(address: str) -> bool:
    """Whether HOST:PORT stands for every address of this machine."""
    return address.rpartition(":")[0] in _WILDCARDS


def advertised_address(listen: str, advertise: str | None, bound_port: int) -> str:
    """`HOST:PORT` at which this process is reached.

    `advertise` wins; its port 0 means the bound one. Without it the host is that of `listen`,
    or this machine's name where `listen` is a wildcard.
    """
    host, _, port = (advertise or listen).rpartition(":")
    if advertise is not None and int(port) != 0:
        return advertise
    return f"{socket.gethostname() if host in _WILDCARDS else host}:{bound_port}"
