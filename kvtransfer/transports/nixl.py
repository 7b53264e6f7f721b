"""NIXL: the sender writes into the receiver's registered blocks by itself, through UCX: RDMA where both hosts have it,
else TCP. A pool on a GPU is registered there, and its blocks are verified there.

The control link is a TCP connection (inside TLS if told so; the payload never is). Each end of a link has an agent of
its own, which only that link's thread uses. What the sender's agent needs of the receiver's, keys among it, comes with
the receiver's HELLO, and goes with the link.

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
import importlib.util
import logging
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from kernels.digest import MIX64
from kvtransfer.base import BlockRef
from kvtransfer.connection import Connection
from kvtransfer.fields import required, required_int
from kvtransfer.handshake import Hello
from kvtransfer.local_pool import LocalPool
from kvtransfer.room import Room
from kvtransfer.transport import Acceptor, Fields, ListenOptions, SendingLane, TransportStatus
from kvtransfer.transports import tcp
from kvtransfer.transports.device import DeviceWork
from kvtransfer.transports.host import XXH3, HostReceivingLane, HostSendingLane, host_status
from tandem.config import keep_ucx_off_other_processes
from tandem.errors import ConfigError, HandshakeMismatch, InternalError, PeerLost, TransferError
from tandem.security.tls import ClientTls, ServerTls
from tandem.types import BlockId

NAME = "nixl"
PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
"""Any one of them will do; the first only chooses among the others, by torch's CUDA."""
_BACKEND = "UCX"
_POLL_S = 0.0003
"""Between two looks at a transfer. Over TCP rare looks are no slower than incessant ones: each takes in more."""
_RDMA_DEVICES = Path("/sys/class/infiniband")

_WITHOUT_BLOCKS = "needs a pool whose blocks lie in host memory or on a GPU that it can name"
_DONE, _UNDER_WAY = "DONE", "PROC"

T = TypeVar("T")
_log = logging.getLogger(__name__)


def package() -> str:
    """The one that is installed."""
    return next(filter(importlib.util.find_spec, PACKAGES), PACKAGES[0])


@cache
def load() -> Any:
    """NIXL's Python module, once UCX was seen to start: the first link of a process should not wait for that.

    Raises ImportError if it is not installed, or what it needs is missing; TransferError if UCX does not start.
    """
    keep_ucx_off_other_processes()
    raise_exceptions = logging.raiseExceptions
    module = importlib.import_module(f"{package()}._api")
    logging.raiseExceptions = raise_exceptions  # the import sets it
    logging.getLogger("nixl").setLevel(logging.WARNING)
    _without_frames(lambda: _made(module))
    return module


def has_rdma() -> bool:
    """Whether this host has a network card that writes memory by itself."""
    return _RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())


class NixlTransport:
    """Implements `transport.Transport`."""

    name = NAME

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

    def listen(self, pool: LocalPool, options: ListenOptions) -> Acceptor:
        """See `Transport`. At any free port, as UCX does."""
        try:
            load()
        except (ImportError, OSError, TransferError) as error:
            raise ConfigError("transport", f"nixl needs the package nixl: {error}") from error
        if not _has_blocks(pool):
            raise ConfigError("transport", f"nixl {_WITHOUT_BLOCKS}")
        sock = tcp.listen(options.host)
        fields = {"host": options.advertise_host, "port": str(sock.getsockname()[1])}
        fields |= {"tls": tcp.on_off(options.tls is not None), "rdma": tcp.on_off(has_rdma())}
        return Acceptor(sock, fields, lambda _: _ReceivingLane(pool, options.tls))

    def unreachable(self, pool: LocalPool, fields: Fields) -> str | None:
        """See `Transport`."""
        if fields.get("tls") != "off":
            return "it would send the payload outside TLS"
        if not has_rdma() or fields.get("rdma") != "on":
            return "without an RDMA device on both sides it is no faster than tcp"
        return None

    async def dial(self, pool: LocalPool, fields: Fields, tls: ClientTls | None) -> tuple[socket.socket, SendingLane]:
        """See `Transport`. One side that was told to use TLS never speaks in clear: HandshakeMismatch."""
        if not _has_blocks(pool):
            raise TransferError(f"nixl {_WITHOUT_BLOCKS}")
        host, port = required(fields, "host"), required_int(fields, "port", 2**16 - 1)
        ours, theirs = tcp.on_off(tls is not None), required(fields, "tls")
        if ours != theirs:
            raise HandshakeMismatch("tls", ours, theirs)
        return await tcp.dial(host, port), _SendingLane(pool, host, tls)


class _Region(NamedTuple):
    """Where a pool's blocks lie in its process, as NIXL counts memory."""

    memory: str  # DRAM or VRAM
    device: int
    address: int
    """Of block 0."""
    num_blocks: int


class _Agent:
    """One end of a link in NIXL, on a thread of its own: `open`, then what `start` is given, then `end`.

    No exception of NIXL's leaves it: the frames that come with one would keep the agent alive.
    """

    def __init__(self, pool: LocalPool) -> None:
        blocks = torch.from_numpy(pool.rows) if pool.device is None else pool.device.blocks
        self._blocks = blocks  # held, so that the memory outlives the agent
        self._nixl: Any = None
        self._region: Any = None
        self._sides: list[Any] = []
        """Our blocks and the peer's, prepared: a piece is then two lists of block ids."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-nixl")
        self.ending: asyncio.Future[None] | None = None  # then nothing more can be started

    @property
    def region(self) -> _Region:
        """Where the blocks lie."""
        device = self._blocks.get_device() if self._blocks.is_cuda else 0
        return _Region("VRAM" if self._blocks.is_cuda else "DRAM", device, self._blocks.data_ptr(), len(self._blocks))

    def start(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Runs `work`, which calls the methods below, after all that was started before. Raises TransferError."""
        return asyncio.get_running_loop().run_in_executor(self._thread, _without_frames, work)

    def end(self) -> asyncio.Future[None]:
        """Ends the agent after all that was started. Idempotent. When it is done, nobody writes the rows by it."""
        if self.ending is None:
            self.ending = self.start(self.drop)
            self._thread.shutdown(wait=False)
        return self.ending

    def open(self) -> bytes:
        """Registers the blocks. Returns what a peer needs to write there."""
        self._nixl = _made(load())
        region = self.region
        self._region = self._nixl.register_memory(
            [(region.address, self._blocks.nbytes, region.device, "")], region.memory
        )
        metadata: bytes = self._nixl.get_agent_metadata()
        return metadata

    def join(self, metadata: bytes, theirs: _Region) -> None:
        """Makes the blocks of a peer a target for `write`."""
        peer = self._nixl.add_remote_agent(metadata)
        for agent, region in (("NIXL_INIT_AGENT", self.region), (peer, theirs)):
            size = self._blocks.shape[1]
            strided = np.array([(region.address, size, region.device, size, region.num_blocks)], np.uint64)
            self._sides.append(self._nixl.prep_xfer_dlist(agent, strided, region.memory))

    def write(self, sources: Sequence[int], targets: Sequence[int], meanwhile: Callable[[], T], patience_s: float) -> T:
        """Writes blocks into the peer's, does `meanwhile`, and returns what that gave once they have arrived.

        Whatever it raises, some bytes may still be on their way, but none of the sources is read any more.
        """
        try:
            return _without_frames(partial(self._write, sources, targets, meanwhile, patience_s))
        except TransferError:
            self.drop()
            raise

    def take_in(self, stop: threading.Event) -> None:
        """Lets peers write, where that takes doing, until it is stopped."""
        while not stop.wait(_POLL_S):
            self._nixl.get_new_notifs()

    def drop(self) -> None:
        """Releases everything that is NIXL's, at once. Idempotent. Raises InternalError if somebody still holds it."""
        if self._nixl is None:
            return
        while self._sides:
            self._sides.pop().release()
        if self._region is not None:
            self._nixl.deregister_memory(self._region)
        agent = weakref.ref(self._nixl.agent)
        self._nixl = None
        if agent() is not None:
            raise InternalError("an agent of NIXL outlives its link")

    def _write(
        self, sources: Sequence[int], targets: Sequence[int], meanwhile: Callable[[], T], patience_s: float
    ) -> T:
        if not self._sides:
            raise PeerLost("the link to the peer's agent has ended")
        ours, theirs = self._sides
        transfer = self._nixl.make_prepped_xfer(
            "WRITE", ours, np.array(sources, np.int32), theirs, np.array(targets, np.int32)
        )
        try:
            state = self._nixl.transfer(transfer)
            result = meanwhile()
            gives_up_s = time.monotonic() + patience_s
            while state == _UNDER_WAY and time.monotonic() < gives_up_s:
                time.sleep(_POLL_S)
                state = self._nixl.check_xfer_state(transfer)
        finally:
            transfer.release()
        if state != _DONE:
            raise PeerLost(f"a write into the peer's blocks ended as {state} after {patience_s:g} s at most")
        return result


class _SendingLane(HostSendingLane):
    """Writes one piece at a time into the peer's blocks."""

    name = NAME

    def __init__(self, pool: LocalPool, host: str, tls: ClientTls | None) -> None:
        super().__init__(pool)
        self._host = host
        self._tls = tls
        self._agent = _Agent(pool)
        self._connection: Connection | None = None
        self._opening: asyncio.Future[bytes] | None = None
        self._peer: tuple[bytes, _Region] | None = None
        """Its metadata, and where its blocks lie."""
        self._work = _device_work(pool)
        self.verify = (XXH3,) if self._work is None else (MIX64,)

    async def secure(self, connection: Connection) -> None:
        self._connection = connection
        if self._tls is not None:
            await connection.begin_tls(self._tls.context(), self._tls.server_name or self._host)
        self._opening = self._agent.start(self._agent.open)  # while the receiver opens its own
        self._opening.add_done_callback(_log_failure)

    def attach(self, theirs: Hello, verify: str) -> None:
        try:
            metadata = base64.b64decode(required(theirs.details, "agent"), validate=True)
        except binascii.Error as error:
            raise TransferError("what the peer says of its agent is not in base64") from error
        memory, device = required(theirs.details, "memory"), required_int(theirs.details, "device", 2**16)
        address = required_int(theirs.details, "address", 2**64 - 1)
        if memory not in {"DRAM", "VRAM"}:
            raise TransferError("the peer's blocks are neither in DRAM nor in VRAM")
        self._peer = metadata, _Region(memory, device, address, theirs.num_blocks)

    async def prepare(self) -> None:
        if self._opening is None or self._peer is None:
            raise InternalError("a lane is prepared before hands were shaken")
        await self._opening
        await self._agent.start(partial(self._agent.join, *self._peer))

    async def place(self, sources: Sequence[BlockId], targets: Sequence[BlockRef], room: Room) -> tuple[int, ...]:
        connection, digests = self._connection, self._pool.checksums if self._work is None else self._work.digests
        if connection is None:
            raise InternalError("a lane places blocks before it is secured")
        into = [target.block_id for target in targets]
        write = partial(self._agent.write, sources, into, partial(digests, sources), connection.timing.reply_s)
        try:
            return await self._agent.start(write)
        except TransferError as error:
            connection.cut(error)
            raise

    def close(self) -> None:
        self._agent.end()
        if self._work is not None:
            self._work.close()


class _ReceivingLane(HostReceivingLane):
    """Has an agent from the handshake on, and takes in what comes while a transfer is open."""

    name = NAME

    def __init__(self, pool: LocalPool, tls: ServerTls | None) -> None:
        super().__init__(pool)
        self._tls = tls
        self._agent = _Agent(pool)
        self._stop_taking: threading.Event | None = None
        self._work = _device_work(pool)
        self.verify = (XXH3,) if self._work is None else (MIX64,)

    async def secure(self, connection: Connection) -> None:
        if self._tls is not None:
            await connection.begin_tls(self._tls.context())

    async def prepare(self) -> None:
        metadata, region = await self._agent.start(self._agent.open), self._agent.region
        self.details = {
            "agent": base64.b64encode(metadata).decode(),
            "memory": region.memory,
            "device": str(region.device),
            "address": str(region.address),
        }

    async def checksums(self, blocks: Sequence[BlockId]) -> tuple[int, ...]:
        if self._work is None:
            return await super().checksums(blocks)
        return await self._work.run(partial(self._work.digests, blocks))

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
        self._agent.end()
        if self._work is not None:
            self._work.close()


def _has_blocks(pool: LocalPool) -> bool:
    """Whether NIXL can be given all blocks; not where they only pass through a ring."""
    return pool.device is not None or pool.ring is None


def _device_work(pool: LocalPool) -> DeviceWork | None:
    """For digests of blocks on a GPU, where they lie."""
    return None if pool.device is None else DeviceWork(pool.device.blocks)


def _made(api: Any) -> Any:
    """An agent without a thread of NIXL's: that one never sleeps."""
    return api.nixl_agent(secrets.token_hex(8), api.nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND]))


def _without_frames(work: Callable[[], T]) -> T:
    """What `work` returns. Any exception of NIXL's becomes a TransferError that refers to nothing of NIXL's."""
    try:
        return work()
    except InternalError:
        raise
    except Exception as error:  # noqa: BLE001 - NIXL's have no common class
        failure = PeerLost(error.message if isinstance(error, TransferError) else f"nixl: {error}")
    raise failure


def _log_failure(work: asyncio.Future[Any]) -> None:
    """A link whose agent broke stands still, which both sides notice by their deadlines."""
    if not work.cancelled() and (error := work.exception()) is not None:
        _log.warning("the agent of a kv link broke: %s", error)
