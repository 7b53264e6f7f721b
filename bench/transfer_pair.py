"""Two processes between which `bench.transfer` moves blocks: a sending pool here, a receiving one in a child.

And what transports are held against: the same bytes by a copy, or by a socket, without checksums.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import uvloop

from engine.kv_cache import KvCache
from engine.memory import MIN_RING_ROWS
from kvtransfer.base import BlockRef, DeviceMemory, Fingerprints, PoolMemory
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from kvtransfer.transport import PIECE_BYTES
from kvtransfer.transports import CUDA_IPC, usable
from shell.clock import MonotonicClock
from tandem.errors import TransferError
from tandem.kv_layout import DType, KvLayout
from tandem.security.tls import ClientTls, ServerTls
from tandem.types import BlockId, new_incarnation

_EXPIRES_IN_S = 60.0
_TIMEOUT_S = 30.0
_RING_BYTES = 64 * 1024 * 1024
"""Of a pool on a GPU."""


class _Quiet:
    """A listener with nothing to do: the sender sees the end."""

    def on_receiving(self) -> None: ...

    def on_committed(self, first_token_payload: bytes) -> None: ...

    def on_failed(self, error: TransferError) -> None: ...

    def on_writer_stopped(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Tls:
    """A folder with ca.crt, tls.crt and tls.key, as docs/security.md makes them."""

    folder: Path

    def _file(self, name: str) -> str:
        return str(self.folder / name)

    def server(self) -> ServerTls:
        """The receiver's side."""
        return ServerTls(self._file("tls.crt"), self._file("tls.key"), self._file("ca.crt"))

    def client(self) -> ClientTls:
        """The sender's side."""
        return ClientTls(self._file("ca.crt"), self._file("tls.crt"), self._file("tls.key"))


@dataclass(frozen=True, slots=True)
class Spec:
    """What a pair is."""

    transport: str
    block_bytes: int
    num_blocks: int
    tls: Tls | None = None
    device: str = "cpu"
    """Where this process's pool lies."""
    peer_device: str = "cpu"
    """Where the child's does."""

    @property
    def num_bytes(self) -> int:
        """Of a hand-off of all blocks."""
        return self.num_blocks * self.block_bytes

    def prints(self) -> Fingerprints:
        """Equal on both sides."""
        return Fingerprints("bench", KvLayout(1, 1, self.block_bytes // 128, 32, DType.BFLOAT16))


@contextmanager
def pool_memory(spec: Spec) -> Iterator[PoolMemory]:
    """A pool of which every page is there: in a memory file, or on a GPU with a ring in one."""
    if spec.device != "cpu":
        with contextlib.closing(_gpu_cache(spec)) as cache:
            assert cache.allocation is not None
            device = DeviceMemory(cache.blocks_view, cache.allocation.shared_fd, cache.allocation.size_bytes)
            yield PoolMemory(cache.host_rows, cache.shared_fd, new_incarnation(), cache.staging, device)
        return
    num_blocks, block_bytes = spec.num_blocks, spec.block_bytes
    fd = os.memfd_create("tandem-bench")
    os.ftruncate(fd, num_blocks * block_bytes)
    mapping = mmap.mmap(fd, num_blocks * block_bytes)
    blocks = torch.frombuffer(mapping, dtype=torch.uint8).view(num_blocks, block_bytes)
    blocks.fill_(1)
    try:
        yield PoolMemory(blocks, fd, new_incarnation())
    finally:
        os.close(fd)  # the mapping goes with its last tensor


def _gpu_cache(spec: Spec) -> KvCache:
    """As a worker's; peers can map it unless the driver cannot share memory."""
    layout, device = spec.prints().layout, torch.device(spec.device)
    rows = min(spec.num_blocks, max(MIN_RING_ROWS, _RING_BYTES // spec.block_bytes))
    can_share = CUDA_IPC in usable(device)
    return KvCache.create(layout, spec.num_blocks, device, shared=True, ring_rows=rows, device_shared=can_share)


_TIMEOUT_S = 30.0


class CopyCeiling:
    """Copies into another mapping of shared memory, of which every page was written before."""

    def __init__(self, source: npt.NDArray[np.uint8]) -> None:
        """`source` is `[N, block_bytes]` uint8."""
        self._source = source
        fd = os.memfd_create("tandem-bench")
        os.ftruncate(fd, source.nbytes)
        self._target = np.frombuffer(mmap.mmap(fd, source.nbytes), np.uint8).reshape(source.shape)
        self._target.fill(1)
        os.close(fd)

    def move(self) -> float:
        """Seconds of one copy of everything."""
        started_s = time.perf_counter()
        np.copyto(self._target, self._source)
        return time.perf_counter() - started_s


class DeviceCopyCeiling:
    """Copies within one GPU."""

    def __init__(self, source: torch.Tensor) -> None:
        """`source` is `[N, block_bytes]` uint8 on a GPU."""
        self._source, self._target = source, torch.empty_like(source)

    def move(self) -> float:
        """Seconds of one copy of everything."""
        torch.cuda.synchronize(self._source.device)
        started_s = time.perf_counter()
        self._target.copy_(self._source)
        torch.cuda.synchronize(self._source.device)
        return time.perf_counter() - started_s


class SocketCeiling:
    """A TCP connection on the loopback to a child process that only receives. `stop` ends the child."""

    def __init__(self, num_bytes: int) -> None:
        self._data = memoryview(np.ones(num_bytes, np.uint8).data)
        listener = socket.create_server(("127.0.0.1", 0))
        port, context = listener.getsockname()[1], multiprocessing.get_context("spawn")
        self._child: BaseProcess = context.Process(target=_receive_all, args=(port, num_bytes), daemon=True)
        self._child.start()
        self._sock, _ = listener.accept()
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.close()

    def move(self) -> float:
        """Seconds until the other side has received everything."""
        started_s = time.perf_counter()
        for first in range(0, len(self._data), PIECE_BYTES):
            self._sock.sendall(self._data[first : first + PIECE_BYTES])
        self._sock.recv(1)
        return time.perf_counter() - started_s

    def stop(self) -> None:
        """Closes the connection, with which the child ends."""
        self._sock.close()
        self._child.join(_TIMEOUT_S)


def _receive_all(port: int, num_bytes: int) -> None:
    memory = memoryview(bytearray(num_bytes))
    with socket.create_connection(("127.0.0.1", port)) as sock:
        while True:
            filled = 0
            while filled < num_bytes:
                count = sock.recv_into(memory[filled:])
                if not count:
                    return
                filled += count
            sock.sendall(b"1")


class Pair:
    """A sender connected to a receiver in a child process; `stop` ends both."""

    def __init__(self, spec: Spec, memory: PoolMemory) -> None:
        """Starts the child. `memory` holds what is sent, and outlives this."""
        self.spec = spec
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._child: BaseProcess = context.Process(target=_receive, args=(theirs, spec), daemon=True)
        self._child.start()
        theirs.close()
        tls = None if spec.tls is None else spec.tls.client()
        self._sender = KvSender(memory, spec.prints(), MonotonicClock(), spec.transport, tls=tls)

    async def hand_off(self, num_blocks: int) -> float:
        """Hands the first `num_blocks` over; 0 = nothing travels but COMMIT.

        Returns the seconds from `open` to COMMITTED; the first call's hold connecting.
        """
        self._pipe.send(num_blocks)
        ticket, endpoint = await asyncio.get_running_loop().run_in_executor(None, self._pipe.recv)
        started_s = time.perf_counter()
        handoff = await self._sender.open(ticket, endpoint, _TIMEOUT_S)
        await handoff.push(handoff.first_block, tuple(BlockId(i) for i in range(num_blocks)))
        await handoff.commit(b"")
        return time.perf_counter() - started_s

    async def stop(self) -> None:
        """Ends the connection and the child."""
        await self._sender.stop()
        self._pipe.send(None)
        self._child.join(_TIMEOUT_S)


def _receive(pipe: Connection, spec: Spec) -> None:
    with pool_memory(replace(spec, device=spec.peer_device)) as memory:
        uvloop.run(_serve_offers(pipe, memory, spec))


async def _serve_offers(pipe: Connection, memory: PoolMemory, spec: Spec) -> None:
    """One offer for every number of blocks on the pipe, until it says None."""
    tls = None if spec.tls is None else spec.tls.server()
    receiver = KvReceiver(memory, spec.prints(), MonotonicClock(), (spec.transport,), "127.0.0.1", tls=tls)
    await receiver.start()
    loop = asyncio.get_running_loop()
    while (num_blocks := await loop.run_in_executor(None, pipe.recv)) is not None:
        blocks = tuple(BlockRef(BlockId(i), 0) for i in range(num_blocks))
        offer = receiver.offer(blocks, _Quiet(), _EXPIRES_IN_S, first_block=0 if blocks else 1)
        pipe.send((offer.ticket, offer.endpoint))
    await receiver.stop()
