"""NCCL: blocks go from GPU to GPU by sends and receives, over whatever NCCL finds between the two.

Each connection has a communicator of two ranks of its own; the sender is rank 0 and names it in its HELLO. Both sides
begin it during the handshake, so that `auto` goes on to the next transport where they cannot meet. Sends begin in the
order of their WRITEs, and the receiver takes every WRITE in that order, those that it refused into scrap: each send
meets its receive, and one group of them runs at a time. A WRITE is one group, a block one send: runs of neighbours
differ on both sides.

The receiver's own kernel writes the pool, out of NCCL's buffers; the pool is never registered with NCCL. So nothing
writes there once a receive has ended, or its abort has. Blocks are verified by `mix64`, computed on each GPU.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from functools import cache

import torch

from kernels.cuda_driver import CudaDriver, CudaError
from kvtransfer.base import DeviceMemory
from kvtransfer.connection import Connection
from kvtransfer.device_work import DeviceWork
from kvtransfer.frame import Frame
from kvtransfer.handshake import Hello
from kvtransfer.nccl_communicator import Communicator, Communicators, Gpu
from kvtransfer.nccl_library import UNIQUE_ID_BYTES, NcclError, NcclLibrary
from kvtransfer.pool import Pool
from kvtransfer.ring import Loan
from kvtransfer.transport import Acceptor, Fields, ListenOptions, SendingLane, TransportStatus
from kvtransfer.transports import tcp
from kvtransfer.transports.cuda_ipc import SLICE, system_driver
from kvtransfer.transports.same_host import boot_id
from shell.thread_work import to_the_end
from tandem.errors import ConfigError, FrameError, TransferError
from tandem.security.tls import ClientTls, ServerTls
from tandem.types import BlockId

NAME = "nccl"
_UNIQUE_ID = "unique_id"


@cache
def system_library() -> NcclLibrary:
    """The machine's own, opened once. Raises NcclError."""
    return NcclLibrary()


class NcclTransport:
    """Implements `transport.Transport`. Counts its communicators, because the GPU has room for few."""

    name = NAME
    splits = False
    gpu_each = True
    dial_s: float | None = 30.0  # a process's first communicator loads the library, looks for networks: often 3 to 10 s

    def __init__(
        self,
        driver: Callable[[], CudaDriver] = system_driver,
        library: Callable[[], NcclLibrary] = system_library,
        communicators: Communicators | None = None,
    ) -> None:
        """`driver` and `library` are asked when a pool is on a GPU, and may raise."""
        self._driver = driver
        self._library = library
        self._communicators = communicators or Communicators()

    def probe(self, device: torch.device) -> TransportStatus:
        """See `Transport`."""
        if device.type != "cuda":
            return TransportStatus(NAME, False, f"pools on {device.type} are not on a GPU")
        try:
            if SLICE in self._driver().device_name(device.index or 0):
                return TransportStatus(NAME, False, f"{device} is a slice of a GPU (MIG), which NCCL does not connect")
            version = self._library().version
        except (CudaError, NcclError) as error:
            return TransportStatus(NAME, False, str(error))
        return TransportStatus(NAME, True, f"from GPU to GPU by NCCL {version}")

    def listen(self, pool: Pool, options: ListenOptions) -> Acceptor:
        """See `Transport`. The port is any free one: a fixed one is tcp's."""
        memory = pool.device
        if memory is None:
            raise ConfigError("transport", "nccl needs a pool on a GPU")
        sock = tcp.listen(options.host)
        fields = {**tcp.address_fields(sock, options), "boot_id": boot_id(), **self._own(memory)}
        return Acceptor(sock, fields, lambda _: _ReceivingLane(pool, memory, self._communicator(memory), options.tls))

    def unreachable(self, pool: Pool, fields: Fields) -> str | None:
        """See `Transport`."""
        if pool.device is None:
            return "this side's pool is not on a GPU"
        try:
            own = self._own(pool.device)
        except (CudaError, NcclError) as error:
            return str(error)
        if fields.get("version") != own["version"]:
            return f"its NCCL is {fields.get('version')}, this side's {own['version']}"
        if fields.get("gpu") == own["gpu"]:
            return "it is on the same GPU, where NCCL allows one process only"
        return None

    async def dial(self, pool: Pool, fields: Fields, tls: ClientTls | None) -> tuple[socket.socket, SendingLane]:
        """See `Transport`. NCCL itself does not encrypt: with TLS, it serves one machine only."""
        if pool.device is None:
            raise TransferError("this side's pool is not on a GPU")
        host, port = tcp.address_of(fields, tls)
        if tls is not None and fields.get("boot_id") != (boot_id() or None):
            raise TransferError("nccl would send blocks to another machine without TLS")
        communicator = self._communicator(pool.device)
        try:
            sock = await tcp.dial(host, port)
        except BaseException:
            communicator.end()
            await to_the_end(asyncio.ensure_future(communicator.ended()))
            raise
        return sock, _SendingLane(pool, pool.device, communicator, host, tls)

    def _communicator(self, memory: DeviceMemory) -> Communicator:
        """Raises TransportFull."""
        gpu = Gpu(self._driver(), self._library(), memory.blocks.device.index or 0)
        return Communicator(gpu, self._communicators)

    def _own(self, memory: DeviceMemory) -> dict[str, str]:
        """What both sides compare. Raises CudaError, NcclError."""
        gpu = self._driver().device_uuid(memory.blocks.device.index or 0)
        return {"gpu": gpu, "version": self._library().version}


class _SendingLane(tcp.NetworkSendingLane):
    """Sends from the pool itself."""

    name = NAME

    def __init__(
        self,
        pool: Pool,
        memory: DeviceMemory,
        communicator: Communicator,
        host: str,
        tls: ClientTls | None,
    ) -> None:
        super().__init__(pool, host, tls, work=DeviceWork(memory.blocks))
        self._communicator = communicator
        self._threads.append(communicator)
        self._unique_id = b""
        self._source = memory.blocks.data_ptr()
        self._begun: asyncio.Future[None] | None = None

    async def secure(self, connection: Connection) -> None:
        await super().secure(connection)
        self._communicator.watch(connection.sock)
        # Not before there is a peer: NCCL never gives back what waits for one that does not come.
        self._unique_id = await self._communicator.unique_id()
        self.details = {_UNIQUE_ID: self._unique_id.hex()}

    async def receive_hello(self, connection: Connection) -> Frame:
        """Waits for the receiver's frame, then until both ends have begun; `attach` raises if that failed."""
        self._begun = self._communicator.begin(self._unique_id, rank=0)
        frame = await connection.receive()
        await asyncio.wait({self._begun})
        return frame

    def attach(self, theirs: Hello, verify: str) -> None:
        super().attach(theirs, verify)
        if self._begun is not None:
            self._begun.result()

    def announce(
        self, connection: Connection, write: Frame, sources: Sequence[BlockId], loan: Loan
    ) -> asyncio.Future[None] | None:
        connection.send(write)
        size = self._pool.block_bytes
        return self._communicator.move(lambda: [self._source + source * size for source in sources], size, send=True)


class _ReceivingLane(tcp.NetworkReceivingLane):
    """Receives into the pool itself, or into scrap."""

    name = NAME
    _work: DeviceWork

    def __init__(self, pool: Pool, memory: DeviceMemory, communicator: Communicator, tls: ServerTls | None) -> None:
        super().__init__(pool, tls, DeviceWork(memory.blocks))
        self._communicator = communicator
        self._threads.append(communicator)
        self._blocks = memory.blocks
        self._scrap: torch.Tensor | None = None

    async def secure(self, connection: Connection) -> None:
        await super().secure(connection)
        self._communicator.watch(connection.sock)

    def attach(self, theirs: Hello, verify: str) -> None:
        super().attach(theirs, verify)
        self._communicator.begin(_unique_id(theirs), rank=1)

    async def receive(
        self, connection: Connection, blocks: Sequence[BlockId], num_bytes: int, wanted: Callable[[], bool]
    ) -> None:
        """Even a cancelled call returns only after the receive has ended."""
        size = self._pool.block_bytes
        targets, count = tuple(blocks) if wanted() else (), num_bytes // size
        received = self._communicator.move(lambda: self._addresses(targets, count), size, send=False)
        await to_the_end(received, self._communicator.give_up)

    def _addresses(self, targets: Sequence[BlockId], count: int) -> list[int]:
        """Returns the addresses of `targets`, or `count` times the same scrap."""
        if targets:
            return [self._blocks.data_ptr() + target * self._pool.block_bytes for target in targets]
        if self._scrap is None:
            self._scrap = self._work.spare_block()
        return [self._scrap.data_ptr()] * count


def _unique_id(theirs: Hello) -> bytes:
    """What the sender named the communicator. Raises FrameError."""
    try:
        unique_id = bytes.fromhex(theirs.details.get(_UNIQUE_ID, ""))
    except ValueError as error:
        raise FrameError("the sender's unique id is not hexadecimal") from error
    if len(unique_id) != UNIQUE_ID_BYTES:
        raise FrameError(f"the sender's unique id has {len(unique_id)} bytes, not {UNIQUE_ID_BYTES}")
    return unique_id
