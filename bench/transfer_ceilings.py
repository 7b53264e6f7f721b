"""What `bench.transfer` holds transports against: the same bytes by a plain copy, with checksums, by a raw socket."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from kernels.digest import digest_blocks

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
