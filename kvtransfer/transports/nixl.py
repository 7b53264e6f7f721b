"""NIXL: the sender itself writes into the receiver's registered blocks, through UCX: RDMA where both hosts have it,
else TCP. A pool on a GPU is registered there, and its blocks are verified there.

The control link is a TCP connection (inside TLS if configured; the payload never is). Each end of a link has an agent
of its own, which only that link's thread uses. What the sender's agent needs of the receiver's, keys among it, comes
with the receiver's HELLO, and goes with the link.

Order: an agent's DONE includes a flush, so that the bytes lie in the receiver's blocks; only then the WRITE is said.
A notification by NIXL itself would say the same a second time.

Proof: bytes reach the blocks only through the receiver's own agent, which takes them in on TCP, and by whose keys the
network card admits them on RDMA; what lets a process of the same host write without it is switched off. So the
receiver ends its agent when a link ends without a BYE, and asks nothing of the peer. A sender whose write did not end
well cannot say what still lies in the network: it cuts the link instead of saying DRAINED, ABORT or BYE.

The lanes' own threads move bytes, and sleep in between, while a piece or an offer is open.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import socket
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvtransfer.connection import Connection
from kvtransfer.device_work import DeviceWork
from kvtransfer.fields import required, required_int
from kvtransfer.handshake import Hello
from kvtransfer.nixl_agent import Agent, Region, load
from kvtransfer.plan import places
from kvtransfer.pool import Pool
from kvtransfer.ring import Loan
from kvtransfer.transport import Acceptor, Fields, ListenOptions, SendingLane, TransportStatus
from kvtransfer.transports import tcp
from kvtransfer.transports.host import host_status
from tandem.errors import ConfigError, InternalError, TransferError
from tandem.logger import get_logger
from tandem.security.tls import ClientTls, ServerTls
from tandem.types import BlockId

NAME = "nixl"
_RDMA_DEVICES = Path("/sys/class/infiniband")

_WITHOUT_BLOCKS = "needs a pool whose blocks lie in host memory or on a GPU that it can name"

_log = get_logger(__name__)


def has_rdma() -> bool:
    """Whether this host has a network card that itself writes memory."""
    return _RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())


class NixlTransport:
    """Implements `transport.Transport`."""

    name = NAME
    splits = True
    gpu_each = False
    dial_s: float | None = None

    def probe(self, device: torch.device) -> TransportStatus:
        """See `Transport`."""
        try:
            load()
        except (ImportError, OSError, TransferError) as error:
            return TransportStatus(NAME, False, f"needs the package nixl: {error}")
        if device.type not in {"cpu", "cuda"}:
            return host_status(NAME, device, "")
        way = "RDMA or TCP" if has_rdma() else "TCP, as there is no RDMA device"
        return TransportStatus(NAME, True, f"sender writes into the receiver's memory through UCX, over {way}")

    def listen(self, pool: Pool, options: ListenOptions) -> Acceptor:
        """See `Transport`. At any free port, as UCX does."""
        try:
            load()
        except (ImportError, OSError, TransferError) as error:
            raise ConfigError("transport", f"nixl needs the package nixl: {error}") from error
        if not _has_blocks(pool):
            raise ConfigError("transport", f"nixl {_WITHOUT_BLOCKS}")
        sock = tcp.listen(options.host)
        fields = tcp.address_fields(sock, options) | {"rdma": tcp.on_off(has_rdma())}
        return Acceptor(sock, fields, lambda _: _ReceivingLane(pool, options.tls))

    def unreachable(self, pool: Pool, fields: Fields) -> str | None:
        """See `Transport`."""
        if fields.get("tls") != "off":
            return "it would send the payload outside TLS"
        if not has_rdma() or fields.get("rdma") != "on":
            return "without an RDMA device on both sides it is no faster than tcp"
        return None

    async def dial(self, pool: Pool, fields: Fields, tls: ClientTls | None) -> tuple[socket.socket, SendingLane]:
        """See `Transport`."""
        if not _has_blocks(pool):
            raise TransferError(f"nixl {_WITHOUT_BLOCKS}")
        host, port = tcp.address_of(fields, tls)
        return await tcp.dial(host, port), _SendingLane(pool, host, tls)


class _SendingLane(tcp.NetworkSendingLane):
    """Writes pieces into the peer's blocks."""

    name = NAME
    splits = True

    def __init__(self, pool: Pool, host: str, tls: ClientTls | None) -> None:
        super().__init__(pool, host, tls, work=_device_work(pool))
        self._agent = Agent(pool)
        self._threads.append(self._agent)
        self._connection: Connection | None = None
        self._opening: asyncio.Future[bytes] | None = None
        self._peer: tuple[bytes, Region] | None = None
        """Its metadata, and where its blocks lie."""

    async def secure(self, connection: Connection) -> None:
        self._connection = connection
        await super().secure(connection)
        self._opening = self._agent.start(self._agent.open)  # while the receiver opens its own
        self._opening.add_done_callback(_log_failure)

    def attach(self, theirs: Hello, verify: str) -> None:
        super().attach(theirs, verify)
        if self._work is not None and not self._plan.is_whole:
            raise TransferError("nixl digests blocks of a GPU whole, and ranks divide the peer's pool; use tcp")
        try:
            metadata = base64.b64decode(required(theirs.details, "agent"), validate=True)
        except binascii.Error as error:
            raise TransferError("what the peer says of its agent is not in base64") from error
        memory, device = required(theirs.details, "memory"), required_int(theirs.details, "device", 2**16)
        texts = required(theirs.details, "addresses").split(",")
        addresses = tuple(required_int({"address": text}, "address", 2**64 - 1) for text in texts)
        if len(addresses) != theirs.num_ranks:
            raise TransferError(f"the peer of {theirs.num_ranks} ranks names {len(addresses)} addresses")
        if memory not in {"DRAM", "VRAM"}:
            raise TransferError("the peer's blocks are neither in DRAM nor in VRAM")
        self._peer = metadata, Region(memory, device, addresses, theirs.num_blocks)

    async def prepare(self) -> None:
        if self._opening is None or self._peer is None:
            raise InternalError("a lane is prepared before hands were shaken")
        await self._opening
        await self._agent.start(partial(self._agent.join, *self._peer))

    async def place(self, sources: Sequence[BlockId], targets: Sequence[BlockId], loan: Loan) -> tuple[int, ...]:
        connection, digests = self._connection, self._rows.checksums if self._work is None else self._work.digests
        loan.num_spans = len(sources) * len(places(self._plan.target))
        if connection is None:
            raise InternalError("a lane places blocks before it is secured")
        try:
            return await self._agent.write(sources, targets, partial(digests, sources), connection.timing.reply_s)
        except TransferError as error:
            connection.cut(error)
            raise


class _ReceivingLane(tcp.NetworkReceivingLane):
    """Has an agent from the handshake on, and takes in what comes while a transfer is open."""

    name = NAME
    splits = True
    peer_writes = True

    def __init__(self, pool: Pool, tls: ServerTls | None) -> None:
        super().__init__(pool, tls, _device_work(pool))
        self._agent = Agent(pool)
        self._threads.append(self._agent)
        self._stop_taking: threading.Event | None = None

    async def prepare(self) -> None:
        metadata, region = await self._agent.start(self._agent.open), self._agent.region
        self.details = {
            "agent": base64.b64encode(metadata).decode(),
            "memory": region.memory,
            "device": str(region.device),
            "addresses": ",".join(map(str, region.addresses)),
        }

    def expect(self, num_transfers: int) -> None:
        if self._agent.ending is not None:  # what was open then ends one by one
            return
        if num_transfers and self._stop_taking is None:
            self._stop_taking = threading.Event()
            self._agent.start(partial(self._agent.take_in, self._stop_taking)).add_done_callback(_log_failure)
        elif not num_transfers and self._stop_taking is not None:
            self._stop_taking.set()
            self._stop_taking = None

    async def peer_dead(self) -> None:
        self.expect(0)
        ending = self._agent.end()
        await asyncio.wait({ending})  # a waiter that is cancelled leaves it running
        ending.result()

    def close(self) -> None:
        self.expect(0)
        super().close()


def _has_blocks(pool: Pool) -> bool:
    """Whether NIXL can be given all blocks: not where they only pass through rows."""
    return pool.device is not None or not pool.is_staged


def _device_work(pool: Pool) -> DeviceWork | None:
    """Returns what computes digests of blocks on a GPU, where these lie; None = they lie in host memory."""
    return None if pool.device is None else DeviceWork(pool.device.blocks)


def _log_failure(work: asyncio.Future[Any]) -> None:
    """A link whose agent broke stands still, which both sides notice by their deadlines."""
    if not work.cancelled() and (error := work.exception()) is not None:
        _log.warning("nixl agent of a kv link broke", error=str(error))
