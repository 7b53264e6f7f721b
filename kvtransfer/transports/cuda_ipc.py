"""CUDA IPC: the receiver's pool is a shareable allocation on its GPU, which the sender maps and copies blocks into.

Both GPUs are in one machine: the same one, or two that reach each other's memory. Processes meet as those of shm do
(`same_host`); the descriptor that travels is the allocation's, and an orderly BYE or the process's death proves that
the sender has stopped. Order is the host's: a WRITE is said after the copies' event has ended. Each side computes the
blocks' digests on its own GPU. Block 0 lies at byte 0 of the allocation.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Final, NamedTuple

import torch

from kernels.cuda_driver import CudaDriver, CudaError
from kernels.cuda_memory import map_shared
from kvtransfer.base import DeviceMemory
from kvtransfer.connection import Connection
from kvtransfer.device_work import DeviceWork
from kvtransfer.fields import required, required_int
from kvtransfer.frame import Frame
from kvtransfer.handshake import Hello
from kvtransfer.pool import Pool
from kvtransfer.ring import Loan
from kvtransfer.transport import Acceptor, Fields, ListenOptions, SendingLane, TransportStatus
from kvtransfer.transports.same_host import (
    SharingLane,
    acceptor,
    cannot_watch,
    dial,
    elsewhere,
    receive_with_descriptors,
)
from tandem.errors import ConfigError, TransferError
from tandem.security.tls import ClientTls
from tandem.types import BlockId

NAME = "cuda_ipc"
_MAX_ALLOCATION_BYTES = 1 << 48
SLICE = " MIG "
"""In the name of a slice of a GPU."""


@cache
def system_driver() -> CudaDriver:
    """The machine's own, opened once. Raises CudaError."""
    return CudaDriver()


class CudaIpcTransport:
    """Implements `transport.Transport`. Plain: the kernel names the peer's user, and nothing leaves the machine."""

    name = NAME
    splits = False
    gpu_each = False
    dial_s: float | None = None

    def __init__(self, driver: Callable[[], CudaDriver] = system_driver) -> None:
        """`driver` is asked when a pool is on a GPU, and may raise CudaError."""
        self._driver = driver

    def probe(self, device: torch.device) -> TransportStatus:
        """See `Transport`."""
        reason = f"pools on {device.type} are not on a GPU" if device.type != "cuda" else cannot_watch()
        reason = reason or self._cannot_share(device.index or 0)
        does = "sender's GPU writes into the receiver's on the same machine"
        return TransportStatus(NAME, reason is None, reason or does)

    def listen(self, pool: Pool, options: ListenOptions) -> Acceptor:
        """See `Transport`."""
        if pool.device is None or pool.device.shared_fd is None:
            raise ConfigError("transport", "cuda_ipc needs a pool on a GPU that can be shared")
        fields = {
            "gpu": self._driver().device_uuid(_ordinal(pool.device)),
            "allocation_bytes": str(pool.device.allocation_bytes),
        }
        return acceptor(partial(_ReceivingLane, pool, pool.device, pool.device.shared_fd), fields)

    def unreachable(self, pool: Pool, fields: Fields) -> str | None:
        """See `Transport`."""
        if pool.device is None:
            return "this side's pool is not on a GPU"
        return elsewhere(fields) or self._cannot_write(_ordinal(pool.device), fields.get("gpu", ""))

    async def dial(self, pool: Pool, fields: Fields, tls: ClientTls | None) -> tuple[socket.socket, SendingLane]:
        """See `Transport`."""
        if pool.device is None:
            raise TransferError("this side's pool is not on a GPU")
        allocation_bytes = required_int(fields, "allocation_bytes", _MAX_ALLOCATION_BYTES)
        sock = await dial(required(fields, "unix_name"))
        copier = _Copier(self._driver, _ordinal(pool.device), allocation_bytes)
        return sock, _SendingLane(pool, pool.device, copier)

    def _cannot_share(self, device: int) -> str | None:
        try:
            driver = self._driver()
            if SLICE in driver.device_name(device):
                return f"cuda:{device} is a slice of a GPU (MIG), which other processes cannot reach"
            if not driver.can_share_memory(device):
                return f"cuda:{device} has no memory that can be exported"
        except CudaError as error:
            return str(error)
        return None

    def _cannot_write(self, device: int, gpu: str) -> str | None:
        """Why `device` does not reach memory on the GPU of that UUID; None = it does."""
        try:
            driver = self._driver()
            if SLICE in driver.device_name(device):
                return "this side's GPU is a slice (MIG)"
            peer = next((i for i in range(driver.device_count()) if driver.device_uuid(i) == gpu), None)
            if peer is None:
                return f"its GPU {gpu} cannot be seen from here"
            if peer != device and not driver.can_access_peer(device, peer):
                return f"cuda:{device} has no access to its GPU {gpu}"
        except CudaError as error:
            return str(error)
        return None


class _Copier:
    """Copies into a peer's allocation on a stream of its own. All calls on one thread."""

    def __init__(self, driver: Callable[[], CudaDriver], device: int, size_bytes: int) -> None:
        """`size_bytes` of the peer's allocation; `device` is this side's."""
        self._open_driver = driver
        self._device = device
        self.size_bytes: Final = size_bytes
        self._undo = contextlib.ExitStack()
        self._opened: _Opened | None = None

    @property
    def is_open(self) -> bool:
        """Whether the peer's allocation is mapped."""
        return self._opened is not None

    def open(self, descriptor: int) -> None:
        """Maps the peer's allocation and closes the descriptor. Raises CudaError; `close` is due in any case."""
        try:
            driver = self._open_driver()
            context = driver.retain_context(self._device)
            self._undo.callback(driver.release_context, self._device)
            with driver.current(context):
                stream = driver.stream_create()
                self._undo.callback(driver.stream_destroy, stream)
                event = driver.event_create()
                self._undo.callback(driver.event_destroy, event)
                target = map_shared(driver, self._device, descriptor, self.size_bytes)
                self._undo.callback(target.close)
            self._opened = _Opened(driver, context, stream, event, target.address)
        finally:
            os.close(descriptor)

    def copy(self, pieces: Sequence[tuple[int, int, int]], meanwhile: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        """Copies `(offset in the peer's allocation, source address, bytes)` while `meanwhile` runs; returns its result.

        Ends only when no copy runs, or with _NotStopped. Raises CudaError.
        """
        opened = self._opened
        if opened is None:
            raise TransferError("the mapping of the peer's pool is closed")
        driver = opened.driver
        with driver.current(opened.context):
            try:
                for offset, source, num_bytes in pieces:
                    driver.copy_async(opened.target + offset, source, num_bytes, opened.stream)
                driver.event_record(opened.event, opened.stream)
                result = meanwhile()
                driver.event_synchronize(opened.event)
            except BaseException:
                _until_stopped(driver, opened.stream)
                raise
        return result

    def close(self) -> None:
        """Unmaps. Idempotent; an error of the driver changes nothing."""
        self._opened = None
        with contextlib.suppress(CudaError):
            self._undo.close()


class _Opened(NamedTuple):
    """What a copy needs, while the peer's allocation is mapped at `target`."""

    driver: CudaDriver
    context: int
    stream: int
    event: int
    target: int


class _NotStopped(RuntimeError):
    """The driver does not say that the copies have ended."""


def _until_stopped(driver: CudaDriver, stream: int) -> None:
    try:
        driver.stream_synchronize(stream)
    except CudaError as error:
        raise _NotStopped(str(error)) from error


class _SendingLane(SendingLane):
    """Implements `transport.SendingLane`: copies between the GPUs, past host memory."""

    name = NAME
    _work: DeviceWork

    def __init__(self, pool: Pool, memory: DeviceMemory, copier: _Copier) -> None:
        super().__init__(pool, work=DeviceWork(memory.blocks, copier.close))
        self._copier = copier
        self._source = memory.blocks.data_ptr()
        self._connection: Connection | None = None

    async def receive_hello(self, connection: Connection) -> Frame:
        """Maps what came along: off the loop, since a large allocation takes its time."""
        self._connection = connection
        frame, descriptors = await receive_with_descriptors(connection)
        for descriptor in descriptors[1:]:  # none that we would take
            os.close(descriptor)
        if descriptors:  # else it refuses us, and says why in its HELLO
            await self._work.run(partial(self._copier.open, descriptors[0]))
        return frame

    def attach(self, theirs: Hello, verify: str) -> None:
        super().attach(theirs, verify)
        if not self._copier.is_open:
            raise TransferError("the peer did not share its memory")
        if theirs.num_blocks * self._pool.block_bytes > self._copier.size_bytes:
            raise TransferError("the peer's allocation is smaller than its pool")

    async def place(self, sources: Sequence[BlockId], targets: Sequence[BlockId], loan: Loan) -> tuple[int, ...]:
        """Copies run by run, and digests the sources while the copies run."""
        size, pieces = self._pool.block_bytes, []
        for source, target, count in _runs(sources, targets):
            pieces.append((target * size, self._source + source * size, count * size))
        loan.num_spans = len(pieces)
        try:
            return await self._work.run(partial(self._copier.copy, pieces, partial(self._work.digests, sources)))
        except TransferError as error:
            if isinstance(error.__cause__, _NotStopped | TimeoutError):
                self._cut()
            raise

    async def closed(self) -> bool:
        ended = await super().closed()
        if not ended:
            self._cut()
        return ended

    def _cut(self) -> None:
        """Nothing that is said here may claim that this process has stopped writing: now only its death proves it."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)


class _ReceivingLane(SharingLane):
    """Shares the allocation with a peer process and digests what that process wrote."""

    name = NAME

    def __init__(self, pool: Pool, memory: DeviceMemory, shared_fd: int, sock: socket.socket) -> None:
        super().__init__(pool, (shared_fd,), sock, DeviceWork(memory.blocks))


def _ordinal(memory: DeviceMemory) -> int:
    return memory.blocks.device.index or 0


def _runs(sources: Sequence[BlockId], targets: Sequence[BlockId]) -> Iterator[tuple[int, int, int]]:
    """`(source, target, count)` of blocks that are neighbours on both sides: few large copies instead of many small."""
    first = 0
    for i in range(1, len(sources) + 1):
        if i == len(sources) or sources[i] != sources[i - 1] + 1 or targets[i] != targets[i - 1] + 1:
            yield sources[first], targets[first], i - first
            first = i
