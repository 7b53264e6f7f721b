"""What transports that move blocks in host memory have in common: their status, and stream sockets."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, TypeAlias

import torch

from kvtransfer.transport import TransportStatus

_BACKLOG = 128
_Address: TypeAlias = tuple[Any, ...] | str


def host_status(name: str, device: torch.device, does: str) -> TransportStatus:
    """Status of a transport that works on this machine: whether blocks on `device` can pass through host memory."""
    if device.type == "cpu":
        return TransportStatus(name, True, does)
    if device.type == "cuda":
        return TransportStatus(name, True, f"{does}, through host memory")
    return TransportStatus(name, False, f"pools on {device.type} cannot be reached by this version")


def listening(sock: socket.socket, address: _Address) -> socket.socket:
    """`sock`, bound and listening, non-blocking. Raises OSError; the socket is then closed."""
    try:
        sock.bind(address)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


async def connected(sock: socket.socket, address: _Address) -> socket.socket:
    """`sock`, connected, non-blocking; the caller sets the deadline. Raises OSError; the socket is then closed."""
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock
