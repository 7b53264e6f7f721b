"""A transport whose connections move only as far as a test lets them: bytes wait, change, or the cable is cut.

Copies and digests wait too, while the test says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
from typing import Any, cast

import torch

from kvtransfer.pool import Pool
from kvtransfer.transport import (
    Acceptor,
    Fields,
    ListenOptions,
    ReceivingLane,
    SendingLane,
    Transport,
    TransportStatus,
)
from tandem.security.tls import ClientTls

_MOST_DESCRIPTORS = 4
_ALL_BYTES = 1 << 20


class Cable:
    """Between the sender's end of one connection and the receiver's. Index 0 = to the receiver, 1 = to the sender."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        """Owns both."""
        self._ends = (near, far)
        self._ended = [False, False]
        self.harmed = False
        """Whether bytes were changed, or the cable was cut."""
        for end in self._ends:
            end.setblocking(False)

    def move(self, direction: int, most_bytes: int = _ALL_BYTES, *, flip: bool = False) -> int:
        """Moves what waits, with the descriptors that come along; `flip` changes its last byte. Returns how many."""
        source, target = self._ends[direction], self._ends[1 - direction]
        if self._ended[direction]:
            return 0
        try:
            data, descriptors = self._take(source, most_bytes)
        except BlockingIOError:
            return 0
        except OSError:
            self.cut()
            return 0
        try:
            if flip and data:
                self.harmed = True
                data = data[:-1] + bytes([data[-1] ^ 1])
            self._give(target, data, descriptors)
        except OSError:  # it was closed meanwhile
            self.cut()
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._ended[direction] |= not data
        return len(data)

    def cut(self) -> None:
        """Both sides see an end without a goodbye."""
        self.harmed |= not all(self._ended)
        self._ended = [True, True]
        for end in self._ends:
            end.close()

    def _take(self, source: socket.socket, most_bytes: int) -> tuple[bytes, list[int]]:
        if source.family != socket.AF_UNIX:
            return source.recv(most_bytes), []
        data, descriptors, _, _ = socket.recv_fds(source, most_bytes, _MOST_DESCRIPTORS)
        return data, list(descriptors)

    def _give(self, target: socket.socket, data: bytes, descriptors: list[int]) -> None:
        if not data:
            target.shutdown(socket.SHUT_WR)
            return
        sent = socket.send_fds(target, [data], descriptors) if descriptors else 0
        target.setblocking(True)  # more than a buffer holds, the other side would have to read meanwhile
        target.settimeout(1.0)
        target.sendall(data[sent:])
        target.setblocking(False)


class GatedLane:
    """A lane whose copies and digests wait until the gate is open; everything else is the lane's own."""

    def __init__(self, lane: object, gate: asyncio.Event) -> None:
        self._lane: Any = lane
        self._gate = gate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lane, name)

    async def place(self, *args: Any) -> tuple[int, ...]:
        await self._gate.wait()
        checksums: tuple[int, ...] = await self._lane.place(*args)
        await self._gate.wait()
        return checksums

    async def checksums(self, *args: Any) -> tuple[int, ...]:
        await self._gate.wait()
        checksums: tuple[int, ...] = await self._lane.checksums(*args)
        return checksums


class PumpedTransport:
    """Implements `transport.Transport`: another one, with a `Cable` in each connection that is dialled."""

    def __init__(self, inner: Transport) -> None:
        self.name, self.gpu_each, self.dial_s = inner.name, inner.gpu_each, inner.dial_s
        self.splits = inner.splits
        self._inner = inner
        self.cables: list[Cable] = []
        self.dialling = 0
        """Connections that are being made."""
        self.gate = asyncio.Event()
        self.gate.set()

    def probe(self, device: torch.device) -> TransportStatus:
        return self._inner.probe(device)

    def listen(self, pool: Pool, options: ListenOptions) -> Acceptor:
        acceptor = self._inner.listen(pool, options)

        def accept(sock: socket.socket) -> ReceivingLane:
            return cast("ReceivingLane", GatedLane(acceptor.accept(sock), self.gate))

        return dataclasses.replace(acceptor, accept=accept)

    def unreachable(self, pool: Pool, fields: Fields) -> str | None:
        return self._inner.unreachable(pool, fields)

    async def dial(self, pool: Pool, fields: Fields, tls: ClientTls | None) -> tuple[socket.socket, SendingLane]:
        self.dialling += 1
        try:
            far, lane = await self._inner.dial(pool, fields, tls)
        finally:
            self.dialling -= 1
        mine, near = socket.socketpair()
        self.cables.append(Cable(near, far))
        return mine, cast("SendingLane", GatedLane(lane, self.gate))

    def move_all(self) -> int:
        """Moves whatever waits anywhere. Returns how many bytes."""
        return sum(cable.move(direction) for cable in self.cables for direction in (0, 1))

    def close(self) -> None:
        for cable in self.cables:
            with contextlib.suppress(OSError):
                cable.cut()
