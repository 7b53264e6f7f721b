"""What `bench.transfer` holds transports against: the same bytes by a copy, or by a socket, without checksums."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import socket
import time
from multiprocessing.process import BaseProcess

import numpy as np
import numpy.typing as npt
import torch

from kvtransfer.handoff import PIECE_BYTES

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
