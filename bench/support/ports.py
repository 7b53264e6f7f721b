"""Ports that a process is told to listen on, chosen before it starts."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_LOWEST = 10_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> tuple[int, ...]:
    """Ports on loopback that nobody listens on, all below those that the kernel hands out by itself.

    So no connection takes one before its process listens, or while that process restarts.
    """
    candidates = range(_LOWEST, _first_ephemeral())
    found: list[int] = []
    with contextlib.ExitStack() as held:  # until all are chosen
        for port in random.SystemRandom().sample(candidates, len(candidates)):
            if len(found) == count:
                break
            with contextlib.suppress(OSError):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(port)
    return tuple(found)


def _first_ephemeral() -> int:
    return int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32_768
