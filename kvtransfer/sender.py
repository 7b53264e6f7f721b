"""The sending pool: one link per receiving pool, dialled when first needed, hand-offs multiplexed over it.

    choose the transport → connect → secure → HELLO both ways → attach → `Link`

See `base.Sender` for the contract.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence

import torch

from kvtransfer.base import Fingerprints, Handoff, PoolMemory
from kvtransfer.connection import Connection, expect
from kvtransfer.endpoint import Endpoint
from kvtransfer.frame import Frame, FrameType
from kvtransfer.handshake import Hello, agreed_verify, compare
from kvtransfer.link import Link
from kvtransfer.pool import Pool
from kvtransfer.ticket import Ticket
from kvtransfer.timing import Timing
from kvtransfer.transport import Fields, SendingLane, Transport, TransportFull, TransportStatus
from kvtransfer.transports import AUTO, TRANSPORTS, named
from shell.clock import Clock
from tandem.errors import HandshakeMismatch, PeerLost, TicketRefused, TransferError
from tandem.logger import get_logger
from tandem.security.tls import ClientTls

_log = get_logger(__name__)


class KvSender:
    """Implements `base.Sender`; `transport` is `auto` or a transport's name."""

    def __init__(
        self,
        memory: PoolMemory,
        fingerprints: Fingerprints,
        clock: Clock,
        transport: str,
        *,
        tls: ClientTls | None = None,
        timing: Timing | None = None,
        known: Sequence[Transport] = TRANSPORTS,
    ) -> None:
        """`tls` is for what leaves the machine; None = plain. Raises ConfigError on a transport that is not known."""
        self._is_forced = transport != AUTO
        self._transports = named((transport,), known) if self._is_forced else known
        self._pool = Pool(memory, fingerprints)
        self._statuses: dict[str, TransportStatus] = {}
        self._clock = clock
        self._timing = timing or Timing()
        self._tls = tls
        self._links: dict[bytes, asyncio.Task[Link]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._stopped = False

    async def open(self, ticket: bytes, endpoint: bytes, timeout_s: float) -> Handoff:
        """See `base.Sender.open`."""
        shown = Ticket.decode(ticket)
        try:
            async with asyncio.timeout(timeout_s):
                link = await self._link(endpoint)
        except TimeoutError:
            raise PeerLost(f"no connection for transfer {shown.transfer_id} within {timeout_s:g} s") from None
        return await link.open(shown)

    async def stop(self) -> None:
        """Aborts every hand-off and closes every connection. Idempotent."""
        self._stopped = True
        for endpoint in tuple(self._links):
            self._forget(endpoint)
        await asyncio.gather(*self._leaving)
        self._pool.close()

    async def _link(self, endpoint: bytes) -> Link:
        """The open link to the endpoint, dialled once for all who ask at the same time."""
        if self._stopped:
            raise TransferError("the sender has stopped")
        wanted = Endpoint.decode(endpoint)
        self._forget_gone(wanted)
        dialing = self._links.pop(endpoint, None)
        if dialing is None:
            work = self._dial(wanted)
            dialing = asyncio.get_running_loop().create_task(work, name="kv-dial")
        self._links[endpoint] = dialing  # the last one in order is the last one used
        await asyncio.wait({dialing})  # a caller that is cancelled leaves it running for the others
        if dialing.cancelled():
            raise PeerLost("the connection was given up")
        return dialing.result()

    def _forget_gone(self, wanted: Endpoint) -> None:
        """Closes links that have ended, and those to peers that `wanted` has replaced at their address."""
        for known, task in list(self._links.items()):
            if _has_ended(task) or wanted.replaces(Endpoint.decode(known)):
                self._forget(known)

    def _forget(self, endpoint: bytes) -> asyncio.Task[None]:
        """Hangs up in a task of its own: while one opener waited for that, another could dial the endpoint again."""
        leaving = asyncio.get_running_loop().create_task(_hang_up(self._links.pop(endpoint)), name="kv-hang-up")
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)
        return leaving

    async def _dial(self, endpoint: Endpoint) -> Link:
        """A link over the best transport that works; each is tried for a lease at most, and the log says why which.

        Raises TransferError of the last one tried, with the reasons against all others; HandshakeMismatch at once.
        """
        passed_over: dict[str, str] = {}
        failure: TransferError | None = None
        for transport in self._transports:
            is_offered = transport.name in endpoint.reach
            reason = self._reason_against(transport, endpoint.reach.get(transport.name))
            if reason is not None and (is_offered or self._usable_here(transport)):
                passed_over[transport.name] = reason
            if reason is not None and not (self._is_forced and is_offered):
                continue
            try:
                async with asyncio.timeout(self._timing.lease_s):
                    link = await self._dial_over(transport, endpoint, _listed(passed_over))
            except HandshakeMismatch:
                raise
            except (OSError, TransferError) as error:
                failure = _failed(transport.name, error, reason)
                passed_over[transport.name] = str(failure)
            else:
                _log.info(
                    "kv transport chosen",
                    transport=transport.name,
                    incarnation=endpoint.incarnation,
                    passed_over=_listed(passed_over),
                )
                return link
        if failure is None:
            failure = self._no_common_transport(endpoint, passed_over)
        raise failure

    def _reason_against(self, transport: Transport, fields: Fields | None) -> str | None:
        """Why it should not be tried; None = it should. `fields` are the peer's, None = it does not offer it."""
        if fields is None:
            return "not offered by the peer"
        if not self._usable_here(transport):
            return self._statuses[transport.name].reason
        return transport.unreachable(self._pool, fields)

    def _usable_here(self, transport: Transport) -> bool:
        if transport.name not in self._statuses:
            device = self._pool.device
            self._statuses[transport.name] = transport.probe(device.blocks.device if device else torch.device("cpu"))
        return self._statuses[transport.name].usable

    def _no_common_transport(self, endpoint: Endpoint, reasons: Mapping[str, str]) -> TransferError:
        offered = ", ".join(endpoint.reach)
        if self._is_forced:
            return TransferError(
                f"transport {self._transports[0].name} is not offered by the peer, which has {offered}"
            )
        against = f". {_listed(reasons)}" if reasons else ""
        return TransferError(f"no common transport: the peer offers {offered}{against}")

    async def _dial_over(self, transport: Transport, endpoint: Endpoint, passed_over: str) -> Link:
        sock, lane = await self._connect(transport, endpoint)
        lane.passed_over = "--transport says so" if self._is_forced else passed_over
        connection = Connection(sock, self._timing)
        try:
            await lane.secure(connection)
            connection.start()
            theirs = await self._shake_hands(connection, lane, endpoint)
        except BaseException:
            lane.close()
            await connection.close()
            await lane.closed()
            raise
        return Link(connection, lane, theirs, self._pool, self._clock)

    async def _connect(self, transport: Transport, endpoint: Endpoint) -> tuple[socket.socket, SendingLane]:
        """See `Transport.dial`; if there is no room, the link that has been idle for longest makes it."""
        fields = endpoint.reach[transport.name]
        try:
            return await transport.dial(self._pool, fields, self._tls)
        except TransportFull:
            idle = (known for known, task in self._links.items() if _is_idle_over(task, transport.name))
            longest = next(idle, None)
            if longest is None:
                raise
            await asyncio.wait({self._forget(longest)})
            return await transport.dial(self._pool, fields, self._tls)

    async def _shake_hands(self, connection: Connection, lane: SendingLane, endpoint: Endpoint) -> Hello:
        ours = lane.hello()
        connection.send(Frame(FrameType.HELLO, payload=ours.encode()))
        theirs = Hello.decode(expect(await lane.receive_hello(connection), FrameType.HELLO).payload)
        compare(ours, theirs)
        if theirs.incarnation != endpoint.incarnation:
            raise TicketRefused(f"the endpoint now belongs to incarnation {theirs.incarnation}")
        lane.attach(theirs, agreed_verify(ours, theirs))
        await lane.prepare()
        return theirs


def _failed(name: str, error: OSError | TransferError, reason: str | None) -> TransferError:
    """Returns the error of a failed dial as its caller sees it, of the same class; `reason` spoke against the dial from
    the start.
    """
    failure = error
    if not isinstance(failure, TransferError):
        failure = PeerLost(f"cannot connect over {name}: {failure.strerror or str(failure) or 'no answer in time'}")
    return failure if reason is None else type(failure)(f"{failure}; {reason}")


def _listed(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


def _has_ended(task: asyncio.Task[Link]) -> bool:
    return task.done() and bool(task.cancelled() or task.exception() or not task.result().is_open)


def _is_idle_over(task: asyncio.Task[Link], transport: str) -> bool:
    return task.done() and not _has_ended(task) and task.result().is_idle_over(transport)


async def _hang_up(dialing: asyncio.Task[Link]) -> None:
    dialing.cancel()
    await asyncio.wait({dialing})
    if not dialing.cancelled() and dialing.exception() is None:
        await dialing.result().close()
