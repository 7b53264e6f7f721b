"""The receiving pool's endpoint: listens, runs a session per sender, owns the table of offers.

See `base.Receiver` for the contract. Everything runs on the loop that called `start`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence

from kvtransfer.base import BlockRef, Fingerprints, HandoffListener, Offer, PoolMemory
from kvtransfer.connection import Connection
from kvtransfer.endpoint import Endpoint
from kvtransfer.offers import OfferTable
from kvtransfer.pool import Pool
from kvtransfer.session import Session
from kvtransfer.timing import Timing
from kvtransfer.transport import Acceptor, Fields, ListenOptions, ReceivingLane, Transport, TransportFull
from kvtransfer.transports import TRANSPORTS, named
from kvtransfer.wire import readable
from shell.clock import Clock
from tandem.errors import TransferError
from tandem.logger import get_logger
from tandem.security.tls import ServerTls

MAX_SESSIONS = 1024
"""Senders connected at a time. One more takes the place of one without a transfer, or is turned away."""
MAX_HANDSHAKES = 128
"""The most sessions that have yet to identify their sender; each has a lease to do so."""
_ACCEPT_PAUSE_S = 0.1

_log = get_logger(__name__)


class KvReceiver:
    """Implements `base.Receiver`."""

    def __init__(
        self,
        memory: PoolMemory,
        fingerprints: Fingerprints,
        clock: Clock,
        transports: tuple[str, ...],
        listen_host: str,
        *,
        listen_port: int = 0,
        advertise_host: str | None = None,
        tls: ServerTls | None = None,
        timing: Timing | None = None,
        known: Sequence[Transport] = TRANSPORTS,
    ) -> None:
        """Listens on networks at `listen_port`, 0 = any free one; `advertise_host` is what senders connect to, if not
        `listen_host`. `tls` is for what leaves the machine; None = plain. Raises ConfigError.
        """
        self._transports = named(transports, known)
        self._options = ListenOptions(listen_host, listen_port, advertise_host or listen_host, tls)
        self._pool = Pool(memory, fingerprints)
        self._table = OfferTable(memory.incarnation, fingerprints.layout.fingerprint(), self._pool.num_blocks, clock)
        self._timing = timing or Timing()
        self._endpoint = b""
        self._accepting: dict[asyncio.Task[None], Acceptor] = {}
        self._sessions: dict[asyncio.Task[None], Session] = {}

    @property
    def num_live(self) -> int:
        """Offers that have not ended."""
        return len(self._table)

    async def start(self) -> None:
        """Listens on every transport. Raises ConfigError if a transport cannot listen."""
        reach: dict[str, Fields] = {}
        for transport in self._transports:
            acceptor = transport.listen(self._pool, self._options)
            accepting = asyncio.get_running_loop().create_task(self._accept(acceptor, transport.name), name="kv-accept")
            self._accepting[accepting] = acceptor
            reach[transport.name] = acceptor.fields
        self._endpoint = Endpoint(self._pool.incarnation, reach).encode()

    def offer(
        self, blocks: Sequence[BlockRef], listener: HandoffListener, expires_in_s: float, first_block: int = 0
    ) -> Offer:
        """See `base.Receiver.offer`."""
        ticket = self._table.mint(blocks, listener, expires_in_s, first_block)
        self._pool.make_ready(ticket.blocks.block_ids)
        return Offer(ticket.transfer_id, ticket.encode(), self._endpoint)

    def withdraw(self, transfer_id: str) -> None:
        """The request is gone: fails the offer. Idempotent; unknown ids are no-ops."""
        self._table.withdraw(transfer_id)

    def reap(self) -> None:
        """Fails what has expired."""
        self._table.reap()

    def check_invariants(self) -> None:
        """Raises InternalError if the table of offers contradicts itself."""
        self._table.check_invariants()

    async def stop(self) -> None:
        """Fails every offer, closes every connection and the endpoint. Idempotent.

        Senders get `Timing.stop_s` to say that they stopped writing; an offer whose sender
        does not is left without `on_writer_stopped`, as that would not be true.
        """
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        for acceptor in self._accepting.values():
            acceptor.sock.close()
        self._accepting.clear()
        self._table.fail_all(TransferError("the receiver stops"))
        await asyncio.gather(*(session.finish() for session in self._sessions.values()))
        if self._sessions:
            await asyncio.wait(self._sessions, timeout=self._timing.stop_s)
        for task in self._sessions:
            task.cancel()
        await asyncio.gather(*self._sessions, return_exceptions=True)
        if len(self._table):
            _log.warning("kv transfers end without proof that their writers stopped", num_transfers=len(self._table))
        self._pool.close()

    async def _accept(self, acceptor: Acceptor, transport: str) -> None:
        while True:
            try:
                sock, _ = acceptor.sock.accept()  # not the loop's: that drops what it accepted if it is cancelled then
            except BlockingIOError:
                await readable(acceptor.sock)
                continue
            except OSError as error:  # out of descriptors, or the peer has gone again
                _log.warning("kv connection not accepted", error=str(error))
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            await self._begin_session(sock, acceptor, transport)

    async def _begin_session(self, sock: socket.socket, acceptor: Acceptor, transport: str) -> None:
        with contextlib.ExitStack() as unless_begun:
            unless_begun.callback(sock.close)
            try:
                self._check_room()
                lane = await self._lane(sock, acceptor, transport)
                unless_begun.callback(lane.close)
                session = Session(Connection(sock, self._timing), lane, self._pool, self._table)
            except (TransferError, OSError) as error:
                _log.warning("kv connection refused", error=str(error))
                return
            except Exception:  # noqa: BLE001 - a bug must not end the listener, which is still advertised
                _log.exception("kv connection could not be taken")
                return
            unless_begun.pop_all()
        task = asyncio.get_running_loop().create_task(session.run(), name="kv-session")
        self._sessions[task] = session
        task.add_done_callback(self._session_ended)

    async def _lane(self, sock: socket.socket, acceptor: Acceptor, transport: str) -> ReceivingLane:
        """See `Acceptor.accept`; if there is no room, the idle session that was used least recently makes it."""
        try:
            return acceptor.accept(sock)
        except TransportFull:
            longest = self._longest_idle(lambda session: session.transport == transport)
            if longest is None:
                raise
            longest.cancel()
            await asyncio.wait({longest}, timeout=self._timing.stop_s)
            return acceptor.accept(sock)

    def _longest_idle(self, concerned: Callable[[Session], bool]) -> asyncio.Task[None] | None:
        """Returns the session that is idle longest, among `concerned` sessions not on their way out; None = none is
        idle.
        """
        idle = [task for task, session in self._staying().items() if session.is_idle and concerned(session)]
        return min(idle, key=lambda task: self._sessions[task].last_shown, default=None)

    def _staying(self) -> dict[asyncio.Task[None], Session]:
        return {task: session for task, session in self._sessions.items() if not task.cancelling()}

    def _check_room(self) -> None:
        """Ends the idle session that was used least recently, if there is no room for one more.

        Strangers, who have no ticket to show, must not keep senders out; one of ours dials again for its next hand-off.
        Raises TransferError if transfers are open on all.
        """
        if sum(not session.established for session in self._sessions.values()) >= MAX_HANDSHAKES:
            raise TransferError(f"{MAX_HANDSHAKES} senders are shaking hands")
        num_staying = len(self._staying())
        if num_staying < MAX_SESSIONS:
            return
        longest = self._longest_idle(lambda _: True)
        if longest is None:
            raise TransferError(f"{num_staying} senders are connected, none of them idle")
        longest.cancel()
        _log.warning("idle kv connection closed for a new one", num_senders=num_staying)

    def _session_ended(self, task: asyncio.Task[None]) -> None:
        del self._sessions[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("kv session ended by our own bug", exc_info=error)
