"""How a sender reaches a receiving pool: choose the transport, connect, shake hands."""

from __future__ import annotations

import asyncio
import os
import socket

from kvtransfer.connection import Connection, expect
from kvtransfer.endpoint import Endpoint
from kvtransfer.frame import Frame, FrameType
from kvtransfer.handshake import Hello, compare
from kvtransfer.lane import Lane
from kvtransfer.link import Link
from kvtransfer.local_pool import LocalPool
from kvtransfer.timing import Timing
from kvtransfer.transports import AUTO, SHM, TCP, shm, tcp
from tandem.clock import Clock
from tandem.errors import HandshakeMismatch, PeerLost, TicketRefused, TransferError
from tandem.security.tls import ClientTls


def candidates(wanted: str, endpoint: Endpoint) -> tuple[str, ...]:
    """Transports to try, best first. Raises TransferError if a fixed one is not offered."""
    offered = endpoint.transports
    if wanted != AUTO:
        if wanted not in offered:
            raise TransferError(f"transport {wanted} is not offered by the peer, which has {', '.join(offered)}")
        return (wanted,)
    near = bool(endpoint.boot_id) and endpoint.boot_id == shm.boot_id() and endpoint.uid == os.getuid()
    found = tuple(name for name in (SHM, TCP) if name in offered and (name != SHM or near))
    if not found:
        raise TransferError(f"no common transport: the peer offers {', '.join(offered)}")
    return found


class Dialer:
    """Connects the local pool to receiving pools; keeps nothing."""

    def __init__(
        self, pool: LocalPool, transport: str, clock: Clock, timing: Timing, tls: ClientTls | None = None
    ) -> None:
        """`tls` is for connections over tcp; None = they are plain."""
        self._pool = pool
        self._tls = tls
        self._transport = transport
        self._clock = clock
        self._timing = timing

    async def dial(self, endpoint: Endpoint) -> Link:
        """A link over the first transport that works; each is tried for a lease at most.

        Raises TransferError of the last one tried; HandshakeMismatch at once.
        """
        failure = TransferError("no transport was tried")
        for name in candidates(self._transport, endpoint):
            try:
                async with asyncio.timeout(self._timing.lease_s):
                    return await self._dial_over(name, endpoint)
            except HandshakeMismatch:
                raise
            except OSError as error:
                failure = PeerLost(f"cannot connect over {name}: {error.strerror or error}")
            except TransferError as error:
                failure = error
        raise failure

    async def _dial_over(self, name: str, endpoint: Endpoint) -> Link:
        if name == SHM:
            sock = await shm.dial(endpoint.unix_name)
        else:
            self._agree_on_tls(endpoint)
            sock = await tcp.dial(endpoint.tcp_host, endpoint.tcp_port)
        connection = _wrap(sock, self._timing)
        try:
            if name == TCP and self._tls is not None:
                server_name = self._tls.server_name or endpoint.tcp_host
                await connection.begin_tls(self._tls.context(), server_name)
            connection.start()
            hello, lane = await self._shake_hands(name, connection, endpoint)
        except BaseException:
            await connection.close()
            raise
        return Link(connection, lane, hello.incarnation, hello.num_blocks, self._pool, self._clock, self._timing)

    def _agree_on_tls(self, endpoint: Endpoint) -> None:
        """Neither side gives way: one that was told to use TLS never speaks in clear. Raises HandshakeMismatch."""
        ours = self._tls is not None
        if ours != endpoint.tls:
            raise HandshakeMismatch("tls", _on_off(ours), _on_off(endpoint.tls))

    async def _shake_hands(self, name: str, connection: Connection, endpoint: Endpoint) -> tuple[Hello, Lane]:
        ours = self._pool.hello(name)
        connection.send(Frame(FrameType.HELLO, payload=ours.encode()))
        descriptor: int | None = None
        if name == SHM:
            frame, descriptor = await shm.receive_with_descriptor(connection)
        else:
            frame = await connection.receive()
        try:
            theirs = _judge(frame, ours, endpoint)
            if name == TCP:
                return theirs, tcp.TcpLane(self._pool)
            if descriptor is None:
                raise TransferError("the peer did not share its memory")
            taken, descriptor = descriptor, None
            return theirs, shm.ShmLane(self._pool, taken, theirs.num_blocks)
        finally:
            if descriptor is not None:
                os.close(descriptor)


def _on_off(tls: bool) -> str:
    return "on" if tls else "off"


def _judge(frame: Frame, ours: Hello, endpoint: Endpoint) -> Hello:
    theirs = Hello.decode(expect(frame, FrameType.HELLO).payload)
    compare(ours, theirs)
    if theirs.incarnation != endpoint.incarnation:
        raise TicketRefused(f"the endpoint now belongs to incarnation {theirs.incarnation}")
    return theirs


def _wrap(sock: socket.socket, timing: Timing) -> Connection:
    try:
        return Connection(sock, timing)
    except OSError:
        sock.close()
        raise
