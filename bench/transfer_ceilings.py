"""What `bench.transfer` holds transports against: the same bytes a copy, with checksums, a socket, NIXL alone."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from kernels.digest import digest_blocks
from kvtransfer.transports import nixl

_PIECE_BYTES = 4 * 1024 * 1024
_TIMEOUT_S = 30.0


class CopyCeiling:
    """Copies into another mapping of shared memory, of which every page was written before. One thread."""

    def __init__(self, source: npt.NDArray[np.uint8]) -> None:
        """`source` is `[N, block_bytes]` uint8."""
        self._source = source
        fd = os.memfd_create("tandem-bench")
        os.ftruncate(fd, source.nbytes)
        self._target = np.frombuffer(mmap.mmap(fd, source.nbytes), np.uint8).reshape(source.shape)
        os.close(fd)
        self._target.fill(1)

    def plain(self) -> float:
        """Seconds of one copy of everything."""
        started_s = time.perf_counter()
        np.copyto(self._target, self._source)
        return time.perf_counter() - started_s

    def with_checksums(self) -> float:
        """Seconds of a copy block by block, each hashed where it is read."""
        started_s = time.perf_counter()
        for source, target in zip(self._source, self._target, strict=True):
            xxhash.xxh3_64_intdigest(source.data)
            np.copyto(target, source)
        return time.perf_counter() - started_s


class DeviceCopyCeiling:
    """Copies within one GPU."""

    def __init__(self, source: torch.Tensor) -> None:
        """`source` is `[N, block_bytes]` uint8 on a GPU."""
        self._source, self._target = source, torch.empty_like(source)

    def plain(self) -> float:
        """Seconds of one copy of everything."""
        return self._timed(lambda: self._target.copy_(self._source))

    def with_checksums(self) -> float:
        """Seconds of a digest of each block and a copy."""
        ids = torch.arange(len(self._source), device=self._source.device)

        def work() -> None:
            digest_blocks(self._source, ids)
            self._target.copy_(self._source)

        return self._timed(work)

    def _timed(self, work: Callable[[], object]) -> float:
        torch.cuda.synchronize(self._source.device)
        started_s = time.perf_counter()
        work()
        torch.cuda.synchronize(self._source.device)
        return time.perf_counter() - started_s


class NixlCeiling:
    """NIXL's own write of the same blocks to a child process that takes them in; neither sleeps. `stop` ends it."""

    def __init__(self, blocks: torch.Tensor) -> None:
        """`blocks` `[N, block_bytes]` uint8 in host memory, which outlive this."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._child: BaseProcess = context.Process(target=_take_in_all, args=(theirs, tuple(blocks.shape)), daemon=True)
        self._child.start()
        self._agent = _registered(blocks)
        metadata, address = self._pipe.recv()
        peer = self._agent.add_remote_agent(metadata)
        self._ids = np.arange(len(blocks), dtype=np.int32)
        self._ours = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", _strided(blocks.data_ptr(), blocks.shape), "DRAM")
        self._theirs = self._agent.prep_xfer_dlist(peer, _strided(address, blocks.shape), "DRAM")

    def move(self) -> float:
        """Seconds until all blocks lie in the other side's memory."""
        transfer = self._agent.make_prepped_xfer("WRITE", self._ours, self._ids, self._theirs, self._ids)
        started_s = time.perf_counter()
        state = self._agent.transfer(transfer)
        while state == "PROC":
            state = self._agent.check_xfer_state(transfer)
        seconds = time.perf_counter() - started_s
        transfer.release()
        if state != "DONE":
            raise RuntimeError(f"a write of NIXL's ended as {state}")
        return seconds

    def stop(self) -> None:
        """Ends the child."""
        self._pipe.send(None)
        self._child.join(_TIMEOUT_S)


def _take_in_all(pipe: Connection, shape: tuple[int, int]) -> None:
    blocks = torch.ones(shape, dtype=torch.uint8)
    agent = _registered(blocks)
    pipe.send((agent.get_agent_metadata(), blocks.data_ptr()))
    while not pipe.poll():
        agent.get_new_notifs()


def _registered(blocks: torch.Tensor) -> Any:
    """An agent that knows the blocks."""
    api = nixl.load()
    config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
    agent = api.nixl_agent(secrets.token_hex(8), config)
    agent.register_memory([(blocks.data_ptr(), blocks.nbytes, 0, "")], "DRAM")
    return agent


def _strided(address: int, shape: Sequence[int]) -> Any:
    """The blocks as NIXL lists them."""
    num_blocks, size = shape
    return np.array([(address, size, 0, size, num_blocks)], np.uint64)


class SocketCeiling:
    """A TCP connection on the loopback to a child process that only receives; `stop` ends it."""

    def __init__(self, num_bytes: int) -> None:
        self._payload = memoryview(bytearray(b"1") * num_bytes)
        listener = socket.create_server(("127.0.0.1", 0))
        context = multiprocessing.get_context("spawn")
        self._child: BaseProcess = context.Process(
            target=_receive_all, args=(listener.getsockname()[1], num_bytes), daemon=True
        )
        self._child.start()
        self._sock, _ = listener.accept()
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.close()

    def move(self) -> float:
        """Seconds until the other side has received everything."""
        started_s = time.perf_counter()
        for start in range(0, len(self._payload), _PIECE_BYTES):
            self._sock.sendall(self._payload[start : start + _PIECE_BYTES])
        self._sock.recv(1)
        return time.perf_counter() - started_s

    def stop(self) -> None:
        """The child ends with the connection."""
        self._sock.close()
        self._child.join(_TIMEOUT_S)


def _receive_all(port: int, num_bytes: int) -> None:
    memory = memoryview(bytearray(b"1") * num_bytes)
    with socket.create_connection(("127.0.0.1", port)) as sock:
        while True:
            filled = 0
            while filled < num_bytes:
                count = sock.recv_into(memory[filled:])
                if not count:
                    return
                filled += count
            sock.sendall(b"1")
