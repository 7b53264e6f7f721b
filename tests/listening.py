"""Which TCP ports a process listens on, as the kernel knows it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_LISTEN = "0A"


def listening_ports(pid: int) -> set[int]:
    """Every port of process `pid`, IPv4 and IPv6."""
    inodes = _socket_inodes(pid)
    ports: set[int] = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == _LISTEN and columns[9] in inodes:
                ports.add(int(columns[1].rpartition(":")[2], 16))
    return ports


def _socket_inodes(pid: int) -> set[str]:
    found: set[str] = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed since
            target = os.readlink(entry)
            if target.startswith("socket:["):
                found.add(target[len("socket:[") : -1])
    return found
