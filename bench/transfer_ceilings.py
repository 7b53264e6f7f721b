"""What `bench.transfer` holds transports against: the same bytes by a copy, or by a socket.

Each also with what verification needs at least: every byte hashed on both sides, without protocol, threads or loops.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import numpy as np
import numpy.typing as npt
import torch

from kernels.digest import digest_blocks
from kvtransfer.handoff import PIECE_BYTES
from kvtransfer.rows import Rows

_TIMEOUT_S = 30.0


class CopyCeiling:
    """Copies into another mapping of shared memory, of which every page was written before. `stop` ends its child."""

    def __init__(self, source: npt.NDArray[np.uint8]) -> None:
        """`source` is `[N, block_bytes]` uint8."""
        self._source = source
        fd = os.memfd_create("tandem-bench")
        os.ftruncate(fd, source.nbytes)
        self._target = np.frombuffer(mmap.mmap(fd, source.nbytes), np.uint8).reshape(source.shape)
        self._target.fill(1)
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        path = f"/proc/{os.getpid()}/fd/{fd}"
        self._child: BaseProcess = context.Process(target=_hash_all, args=(theirs, path, source.shape), daemon=True)
        self._child.start()
        theirs.close()
        self._pipe.recv()
        os.close(fd)

    def plain(self) -> float:
        """Seconds of one copy of everything."""
        started_s = time.perf_counter()
        np.copyto(self._target, self._source)
        return time.perf_counter() - started_s

    def with_checksums(self) -> float:
        """Seconds of a copy in pieces, hashed here as it is read and by a child as it was written."""
        started_s = time.perf_counter()
        num_rows = max(1, PIECE_BYTES // self._source.shape[1])
        for first in range(0, len(self._source), num_rows):
            ids = range(first, min(first + num_rows, len(self._source)))
            Rows(self._source).copy_to(Rows(self._target), ids, ids)
            self._pipe.send(ids)
        self._pipe.send(None)
        self._pipe.recv()
        return time.perf_counter() - started_s

    def stop(self) -> None:
        """Ends the child."""
        self._pipe.close()
        self._child.join(_TIMEOUT_S)


def _hash_all(pipe: Connection, path: str, shape: tuple[int, ...]) -> None:
    with open(path, "r+b") as file:
        rows = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8).reshape(shape)
    pipe.send(None)
    with contextlib.suppress(EOFError):
        while True:
            while (ids := pipe.recv()) is not None:
                Rows(rows).checksums(ids)
            pipe.send(None)


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

    def stop(self) -> None:
        """Nothing to end."""

    def _timed(self, work: Callable[[], object]) -> float:
        torch.cuda.synchronize(self._source.device)
        started_s = time.perf_counter()
        work()
        torch.cuda.synchronize(self._source.device)
        return time.perf_counter() - started_s


class SocketCeiling:
    """A TCP connection on the loopback to a child process that only receives, and hashes if told so. `stop` ends it."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self._rows = np.ones((num_blocks, block_bytes), np.uint8)
        listener = socket.create_server(("127.0.0.1", 0))
        context = multiprocessing.get_context("spawn")
        self._child: BaseProcess = context.Process(
            target=_receive_all, args=(listener.getsockname()[1], (num_blocks, block_bytes)), daemon=True
        )
        self._child.start()
        self._sock, _ = listener.accept()
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.close()

    def move(self) -> float:
        """Seconds until the other side has received everything."""
        return self._move(hashed=False)

    def with_checksums(self) -> float:
        """The same, each piece hashed before it is sent and each block when it has come."""
        return self._move(hashed=True)

    def _move(self, *, hashed: bool) -> float:
        started_s = time.perf_counter()
        self._sock.sendall(bytes([hashed]))
        num_rows = max(1, PIECE_BYTES // self._rows.shape[1])
        for first in range(0, len(self._rows), num_rows):
            piece = self._rows[first : first + num_rows]
            if hashed:
                Rows(piece).checksums(range(len(piece)))
            self._sock.sendall(piece.data)
        self._sock.recv(1)
        return time.perf_counter() - started_s

    def stop(self) -> None:
        """The child ends with the connection."""
        self._sock.close()
        self._child.join(_TIMEOUT_S)


def _receive_all(port: int, shape: tuple[int, ...]) -> None:
    rows = np.ones(shape, np.uint8)
    memory, row_bytes = rows.reshape(-1).data, shape[1]
    with socket.create_connection(("127.0.0.1", port)) as sock:
        while hashed := sock.recv(1):
            filled, found = 0, 0
            while filled < len(memory):
                count = sock.recv_into(memory[filled:])
                if not count:
                    return
                filled += count
                if hashed[0] and filled // row_bytes > found:
                    Rows(rows).checksums(range(found, filled // row_bytes))
                    found = filled // row_bytes
            sock.sendall(b"1")
