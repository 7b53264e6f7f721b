"""How a sender reaches a receiving pool: choose the transport, connect, shake hands."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from kvtransfer.connection import Connection, expect
from kvtransfer.endpoint import Endpoint
from kvtransfer.frame import Frame, FrameType
from kvtransfer.handshake import Hello, agreed_verify, compare
from kvtransfer.link import Link
from kvtransfer.local_pool import LocalPool
from kvtransfer.timing import Timing
from kvtransfer.transport import SendingLane, Transport
from tandem.clock import Clock
from tandem.errors import HandshakeMismatch, PeerLost, TicketRefused, TransferError
from tandem.security.tls import ClientTls


@dataclass(frozen=True, slots=True)
class Dialer:
    """Connects the local pool to receiving pools; keeps nothing."""

    pool: LocalPool
    transports: Sequence[Transport]
    """Best first: one alone is tried whatever it says of itself."""
    clock: Clock
    timing: Timing
    tls: ClientTls | None

    async def dial(self, endpoint: Endpoint) -> Link:
        """A link over the first transport that works; each is tried for a lease at most.

        Raises TransferError of the last one tried; HandshakeMismatch at once.
        """
        failure = TransferError("no transport was tried")
        for transport in self._candidates(endpoint):
            try:
                async with asyncio.timeout(self.timing.lease_s):
                    return await self._dial_over(transport, endpoint)
            except HandshakeMismatch:
                raise
            except OSError as error:
                failure = PeerLost(f"cannot connect over {transport.name}: {error.strerror or error}")
            except TransferError as error:
                failure = error
        raise failure

    def _candidates(self, endpoint: Endpoint) -> Sequence[Transport]:
        """Transports to try, best first. Raises TransferError if there are none."""
        reach = endpoint.reach
        offered = [transport for transport in self.transports if transport.name in reach]
        if len(self.transports) == 1:
            if not offered:
                (wanted,) = self.transports
                raise TransferError(f"transport {wanted.name} is not offered by the peer, which has {', '.join(reach)}")
            return offered
        reasons = {transport: transport.unreachable(self.pool, reach[transport.name]) for transport in offered}
        found = [transport for transport in offered if reasons[transport] is None]
        if not found:
            why = "; ".join(f"{transport.name}: {reason}" for transport, reason in reasons.items())
            raise TransferError(f"no common transport: the peer offers {', '.join(reach)}. {why}")
        return found

    async def _dial_over(self, transport: Transport, endpoint: Endpoint) -> Link:
        sock, lane = await transport.dial(self.pool, endpoint.reach[transport.name], self.tls)
        connection = Connection(sock, self.timing)
        try:
            await lane.secure(connection)
            connection.start()
            theirs = await self._shake_hands(connection, lane, endpoint)
        except BaseException:
            lane.close()
            await connection.close()
            raise
        return Link(connection, lane, theirs, self.pool, self.clock, self.timing)

    async def _shake_hands(self, connection: Connection, lane: SendingLane, endpoint: Endpoint) -> Hello:
        ours = Hello.of(self.pool, lane)
        connection.send(Frame(FrameType.HELLO, payload=ours.encode()))
        theirs = Hello.decode(expect(await lane.receive_hello(connection), FrameType.HELLO).payload)
        compare(ours, theirs)
        if theirs.incarnation != endpoint.incarnation:
            raise TicketRefused(f"the endpoint now belongs to incarnation {theirs.incarnation}")
        lane.attach(theirs, agreed_verify(ours, theirs))
        return theirs
