"""The receiving pool's endpoint: listens, runs a session per sender, owns the table of offers.

See `base.Receiver` for the contract. Everything runs on the loop that called `start`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from typing import TypeAlias

from kvtransfer.base import BlockRef, Fingerprints, HandoffListener, Offer, PoolMemory
from kvtransfer.connection import Connection
from kvtransfer.endpoint import Endpoint
from kvtransfer.lane import Landing
from kvtransfer.local_pool import LocalPool
from kvtransfer.offers import OfferTable
from kvtransfer.session import Session
from kvtransfer.timing import Timing
from kvtransfer.transports import SHM, TCP, shm, tcp
from tandem.clock import Clock
from tandem.errors import ConfigError, TransferError
from tandem.security.tls import ServerTls

MAX_SESSIONS = 1024
"""Senders connected at a time. One more takes the place of one without a transfer, or is turned away."""
MAX_HANDSHAKES = 128
"""Of these, who have yet to say who they are; each has a lease to do so."""
_ACCEPT_PAUSE_S = 0.1
_SessionFor: TypeAlias = Callable[[socket.socket], Session]

_log = logging.getLogger(__name__)


class KvReceiver:
    """Implements `base.Receiver` over shm and tcp."""

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
    ) -> None:
        """Listens for tcp at `listen_port`, 0 = any free one; `advertise_host` is what senders connect to, if not
        `listen_host`. `tls` is for tcp; None = plain. Raises ConfigError.
        """
        for name in transports:
            if name not in {SHM, TCP}:
                raise ConfigError("transport", f"{name!r} is not one of {SHM}, {TCP}")
        if SHM in transports and memory.shared_fd is None:
            raise ConfigError("transport", "shm needs a pool in shared memory")
        self._pool = LocalPool(memory, fingerprints)
        self._table = OfferTable(memory.incarnation, fingerprints.layout.fingerprint(), self._pool.num_blocks, clock)
        self._transports = transports
        self._listen_host = listen_host
        self._listen_port = listen_port
        self._advertise_host = advertise_host or listen_host
        self._tls = tls
        self._timing = timing or Timing()
        self._endpoint = b""
        self._accepting: dict[asyncio.Task[None], socket.socket] = {}
        self._sessions: dict[asyncio.Task[None], Session] = {}

    @property
    def num_live(self) -> int:
        """Offers that have not ended."""
        return len(self._table)

    async def start(self) -> None:
        """Listens on every transport. Raises ConfigError if it cannot."""
        unix_name, tcp_port = "", 0
        if SHM in self._transports:
            unix_name = f"tandem-kv-{secrets.token_hex(16)}"
            self._accept_on(shm.listen(unix_name), self._shm_session)
        if TCP in self._transports:
            listener = tcp.listen(self._listen_host, self._listen_port)
            tcp_port = listener.getsockname()[1]
            self._accept_on(listener, self._tcp_session)
        self._endpoint = Endpoint(
            incarnation=self._pool.incarnation,
            boot_id=shm.boot_id(),
            uid=os.getuid(),
            transports=self._transports,
            unix_name=unix_name,
            tcp_host=self._advertise_host if tcp_port else "",
            tcp_port=tcp_port,
            tls=self._tls is not None,
        ).encode()

    def offer(self, blocks: tuple[BlockRef, ...], listener: HandoffListener, expires_in_s: float) -> Offer:
        """Mints a ticket for exactly these blocks, in this order. Never awaits."""
        ticket = self._table.mint(blocks, listener, expires_in_s)
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
        for listener in self._accepting.values():
            listener.close()
        self._accepting.clear()
        self._table.fail_all(TransferError("the receiver stops"))
        await asyncio.gather(*(session.finish() for session in self._sessions.values()))
        await self._end_sessions()
        if len(self._table):
            _log.warning("%d transfers end without proof that their writers stopped", len(self._table))
        self._pool.close()

    async def _end_sessions(self) -> None:
        tasks = set(self._sessions)
        if tasks:
            await asyncio.wait(tasks, timeout=self._timing.stop_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _shm_session(self, sock: socket.socket) -> Session:
        """Plain: the kernel names the peer's user, and nothing leaves the machine."""
        if self._pool.shared_fd is None:
            raise TransferError("the pool is not in shared memory")
        return self._session(sock, shm.ShmLanding(sock, self._pool.shared_fd), None)

    def _tcp_session(self, sock: socket.socket) -> Session:
        return self._session(sock, tcp.TcpLanding(), self._tls)

    def _session(self, sock: socket.socket, landing: Landing, tls: ServerTls | None) -> Session:
        connection = Connection(sock, self._timing)
        return Session(connection, landing, self._pool, self._table, self._timing.lease_s, tls)

    def _accept_on(self, listener: socket.socket, session_for: _SessionFor) -> None:
        task = asyncio.get_running_loop().create_task(self._accept(listener, session_for), name="kv-accept")
        self._accepting[task] = listener

    async def _accept(self, listener: socket.socket, session_for: _SessionFor) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of descriptors, or the peer has gone again
                _log.warning("cannot accept a kv connection: %s", error)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            self._begin_session(sock, session_for)

    def _begin_session(self, sock: socket.socket, session_for: _SessionFor) -> None:
        try:
            self._check_room()
            session = session_for(sock)
        except (TransferError, OSError) as error:
            _log.warning("refused a kv connection: %s", error)
            sock.close()
            return
        task = asyncio.get_running_loop().create_task(session.run(), name="kv-session")
        self._sessions[task] = session
        task.add_done_callback(self._session_ended)

    def _check_room(self) -> None:
        if sum(not session.established for session in self._sessions.values()) >= MAX_HANDSHAKES:
            raise TransferError(f"{MAX_HANDSHAKES} senders are shaking hands")
        staying = {task: session for task, session in self._sessions.items() if not task.cancelling()}
        if len(staying) >= MAX_SESSIONS:
            _end_idlest(staying)

    def _session_ended(self, task: asyncio.Task[None]) -> None:
        del self._sessions[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a kv session ended by our own bug", exc_info=error)


def _end_idlest(sessions: Mapping[asyncio.Task[None], Session]) -> None:
    """Ends the session that will be missed least: strangers, who have no ticket to show, must not fill the house.

    A sender of ours dials again for its next hand-off. Raises TransferError if transfers are open on all.
    """
    idle = [task for task, session in sessions.items() if session.is_idle]
    if not idle:
        raise TransferError(f"{len(sessions)} senders are connected, none of them idle")
    min(idle, key=lambda task: sessions[task].last_shown).cancel()
    _log.warning("closed an idle kv connection for a new one: %d senders are connected", len(sessions))
