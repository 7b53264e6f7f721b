"""The sending pool: one link per receiving pool, dialled when first needed, hand-offs multiplexed over it.

    choose the transport → connect → secure → HELLO both ways → attach → `Link`

A better transport that takes long to dial (`Transport.dial_s`) is dialled beside a link that is up at once, and later
takes that link's place. A transport over which checksums failed (`Link.on_corrupt`) is barred towards that pool.

See `base.Sender` for the contract.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial

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
from kvtransfer.transport import SendingLane, Transport, TransportFull, TransportStatus
from kvtransfer.transports import AUTO, TRANSPORTS, named
from shell.clock import Clock
from tandem.errors import ChecksumMismatch, HandshakeMismatch, PeerLost, TicketRefused, TransferError
from tandem.logger import get_logger
from tandem.security.tls import ClientTls
from tandem.types import Incarnation

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
        on_barred: Callable[[str], object] = lambda _: None,
    ) -> None:
        """`tls` is for what leaves the machine; None = plain. `on_barred` gets the name of a transport each time it is
        barred towards a pool. Raises ConfigError on a transport that is not known.
        """
        self._is_forced = transport != AUTO
        self._transports = named((transport,), known) if self._is_forced else known
        self._pool = Pool(memory, fingerprints)
        self._statuses: dict[str, TransportStatus] = {}
        self._clock = clock
        self._timing = timing or Timing()
        self._tls = tls
        self._on_barred = on_barred
        self._barred: dict[tuple[Incarnation, str], str] = {}
        """Why a transport is not used towards a pool any more."""
        self._links: dict[bytes, asyncio.Task[Link]] = {}
        """By endpoint: the link that new hand-offs take."""
        self._better: dict[bytes, asyncio.Task[Link]] = {}
        """By endpoint: a link that is being dialled to take that one's place."""
        self._former: set[asyncio.Task[Link]] = set()
        """Links whose place was taken, as long as they may carry hand-offs."""
        self._leaving: set[asyncio.Task[None]] = set()
        self._stopped = False

    async def open(self, ticket: bytes, endpoint: bytes, timeout_s: float) -> Handoff:
        """See `base.Sender.open`."""
        shown = Ticket.decode(ticket)
        try:
            async with asyncio.timeout(
                max(timeout_s, self._transports[0].dial_s or 0) if self._is_forced else timeout_s
            ):
                link = await self._link(endpoint)
        except TimeoutError:
            raise PeerLost(f"no connection for transfer {shown.transfer_id} within {timeout_s:g} s") from None
        return await link.open(shown)

    async def stop(self) -> None:
        """Aborts every hand-off and closes every connection. Idempotent."""
        self._stopped = True
        for endpoint in tuple(self._links):
            self._forget(endpoint)
        for former in self._former:
            self._leave(former)
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
            dialing = asyncio.get_running_loop().create_task(self._dial(endpoint, wanted), name="kv-dial")
        self._links[endpoint] = dialing  # the last one in order is the last one used
        await asyncio.wait({dialing})  # a caller that is cancelled leaves it running for the others
        if dialing.cancelled():
            raise PeerLost("the connection was given up")
        return dialing.result()

    def _forget_gone(self, wanted: Endpoint) -> None:
        """Closes links that have ended or whose place was taken, and those to peers that `wanted` has replaced at their
        address.
        """
        for former in [task for task in self._former if task.result().is_idle]:
            self._former.discard(former)
            self._leave(former)
        for known, task in list(self._links.items()):
            if _has_ended(task) or wanted.replaces(Endpoint.decode(known)):
                self._forget(known)

    def _forget(self, endpoint: bytes) -> asyncio.Task[None]:
        """Hangs up, and returns the task that does so for the link."""
        if (better := self._better.pop(endpoint, None)) is not None:
            self._leave(better)
        return self._leave(self._links.pop(endpoint))

    def _leave(self, link: asyncio.Task[Link]) -> asyncio.Task[None]:
        """Hangs up in a task of its own: while one opener waited for that, another could dial the endpoint again."""
        leaving = asyncio.get_running_loop().create_task(_hang_up(link), name="kv-hang-up")
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)
        return leaving

    async def _dial(self, at: bytes, endpoint: Endpoint) -> Link:
        """A link over the best transport that works, those that take long after all others; the log says why which.

        Raises TransferError of the last one tried, with the reasons against all others; HandshakeMismatch at once.
        """
        passed_over: dict[str, str] = {}
        failure: TransferError | None = None
        late: list[Transport] = []
        for transport in sorted(self._transports, key=self._takes_long):
            is_offered = transport.name in endpoint.reach
            reason = self._reason_against(transport, endpoint)
            if reason is not None and (is_offered or self._usable_here(transport)):
                passed_over[transport.name] = reason
            if reason is not None and not (self._is_forced and is_offered):
                continue
            late = [] if self._takes_long(transport) else self._late_ones(transport, endpoint)
            meanwhile = passed_over | {each.name: "it is being dialled" for each in late}
            try:
                link = await self._try(transport, endpoint, meanwhile)
            except HandshakeMismatch:
                raise
            except (OSError, TransferError) as error:
                failure = _failed(transport.name, error, reason)
                passed_over[transport.name] = str(failure)
            else:
                if late:
                    self._dial_beside(at, late[0], endpoint, passed_over)
                return link
        if failure is None:
            failure = self._no_common_transport(endpoint, passed_over)
        raise failure

    async def _try(self, transport: Transport, endpoint: Endpoint, passed_over: Mapping[str, str]) -> Link:
        """A link over this transport. Raises OSError, TransferError."""
        async with asyncio.timeout(transport.dial_s or self._timing.lease_s):
            link = await self._dial_over(transport, endpoint, _listed(passed_over))
        _log.info(
            "kv transport chosen",
            transport=transport.name,
            incarnation=endpoint.incarnation,
            passed_over=_listed(passed_over),
        )
        return link

    def _takes_long(self, transport: Transport) -> bool:
        return transport.dial_s is not None and not self._is_forced

    def _late_ones(self, chosen: Transport, endpoint: Endpoint) -> list[Transport]:
        """Transports better than the chosen one that take long to dial, and that nothing speaks against."""
        better = self._transports[: list(self._transports).index(chosen)]
        return [each for each in better if self._takes_long(each) and self._reason_against(each, endpoint) is None]

    def _dial_beside(self, at: bytes, transport: Transport, endpoint: Endpoint, passed_over: Mapping[str, str]) -> None:
        """Dials a better link, which takes the place of the one to `at` once it is up."""
        dialing = self._try(transport, endpoint, passed_over)
        better = asyncio.get_running_loop().create_task(dialing, name="kv-dial-better")
        self._better[at] = better
        better.add_done_callback(partial(self._take_place, at, transport.name))

    def _take_place(self, at: bytes, name: str, better: asyncio.Task[Link]) -> None:
        if self._better.get(at) is not better:
            return  # hung up
        del self._better[at]
        if better.cancelled():
            return
        if (error := better.exception()) is not None:
            _log.warning("kv transport not reached", transport=name, cause=str(error) or "no answer in time")
            return
        self._former.add(self._links[at])
        self._links[at] = better

    def _bar(self, endpoint: Endpoint, transport: str, error: ChecksumMismatch) -> None:
        """No link to the endpoint takes this transport from now on, unless it is forced."""
        _log.error("kv transport barred", transport=transport, incarnation=endpoint.incarnation, cause=str(error))
        self._barred[endpoint.incarnation, transport] = f"barred, as checksums failed: {error}"
        self._on_barred(transport)

    def _reason_against(self, transport: Transport, endpoint: Endpoint) -> str | None:
        """Returns why the transport should not be tried, or None."""
        fields = endpoint.reach.get(transport.name)
        if fields is None:
            return "not offered by the peer"
        if (barred := self._barred.get((endpoint.incarnation, transport.name))) is not None:
            return barred
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
        on_corrupt = partial(self._bar, endpoint, transport.name)
        return Link(connection, lane, theirs, self._pool, self._clock, on_corrupt)

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
