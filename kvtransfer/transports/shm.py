"""Shared memory: the receiver's pool lies in a memfd, which the sender maps and writes into.

The descriptor travels over an abstract Unix socket (SCM_RIGHTS), so that a killed process
leaves nothing behind. Only a peer with our own user id gets it. Since the peer writes by
itself, its connection's end proves nothing; an orderly BYE does, or its process's death,
watched through a pidfd taken from the socket.

The pool's row 0 lies at byte 0 of the memfd.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
import struct
from collections.abc import Sequence

import numpy as np

from kvtransfer.base import BlockRef
from kvtransfer.connection import Connection
from kvtransfer.frame import HEADER_BYTES, Frame
from kvtransfer.local_pool import LocalPool, Rows
from kvtransfer.wire import readable
from tandem.errors import ConfigError, PeerLost, TransferError
from tandem.types import BlockId

NAME = "shm"
_BACKLOG = 128
_SO_PEERPIDFD = 77
"""Linux 6.5: a pidfd of the peer itself, immune to reuse of its pid."""
_UCRED = struct.Struct("3i")


def boot_id() -> str:
    """Names this boot of this machine: equal ids may share memory. Empty if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def listen(name: str) -> socket.socket:
    """A listening socket in the abstract namespace. Raises ConfigError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind("\0" + name)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise ConfigError("transport", f"cannot listen on a Unix socket: {error}") from error
    return sock


async def dial(name: str) -> socket.socket:
    """A connected socket; the caller sets the deadline. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, "\0" + name)
    except BaseException:
        sock.close()
        raise
    return sock


def send_with_descriptor(connection: Connection, frame: Frame, descriptor: int) -> None:
    """Sends the connection's first frame, bypassing its queue. Raises PeerLost."""
    data = frame.encode()
    try:
        sent = socket.send_fds(connection.sock, [data], [descriptor])
    except OSError as error:
        raise PeerLost(f"cannot pass the pool's descriptor: {error.strerror}") from error
    if sent != len(data):
        raise PeerLost("the peer's buffer is full before the handshake")


async def receive_with_descriptor(connection: Connection) -> tuple[Frame, int | None]:
    """The connection's first frame and the descriptor passed with it, owned by the caller."""
    await readable(connection.sock)
    try:
        first, descriptors, _, _ = socket.recv_fds(connection.sock, HEADER_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise PeerLost(f"connection failed: {error.strerror}") from error
    try:
        if not first:
            raise PeerLost("the peer closed the connection")
        frame = await connection.receive(first)
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return frame, descriptors[0] if descriptors else None


class ShmLane:
    """Copies blocks into the peer's mapped pool."""

    name = NAME

    def __init__(self, pool: LocalPool, descriptor: int, num_blocks: int) -> None:
        """Maps `num_blocks` blocks of the descriptor, which is closed. Raises TransferError."""
        self._pool = pool
        size_bytes = num_blocks * pool.block_bytes
        try:
            if os.fstat(descriptor).st_size < size_bytes:
                raise TransferError("the peer's shared memory is smaller than its pool")
            self._mapping = mmap.mmap(descriptor, size_bytes)
        except (OSError, ValueError) as error:
            raise TransferError(f"cannot map the peer's pool: {error}") from error
        finally:
            os.close(descriptor)
        # A child forked by this process must not be able to write there after we are gone.
        self._mapping.madvise(mmap.MADV_DONTFORK)
        self._rows: Rows | None = np.frombuffer(self._mapping, np.uint8).reshape(num_blocks, pool.block_bytes)

    def place(self, sources: Sequence[BlockId], targets: Sequence[BlockRef]) -> tuple[int, ...]:
        """Checksums each source, then copies it, while it is in the processor's cache."""
        rows = self._rows
        if rows is None:
            raise PeerLost("the mapping of the peer's pool is closed")
        checksums: list[int] = []
        for source, target in zip(sources, targets, strict=True):
            checksums.extend(self._pool.checksums((source,)))
            np.copyto(rows[target.block_id], self._pool.rows[source])
        return tuple(checksums)

    def inline(self, sources: Sequence[BlockId]) -> Sequence[memoryview]:
        """Nothing: `place` has moved it."""
        del sources
        return ()

    def close(self) -> None:
        """Unmaps the peer's pool; no copy may be running."""
        if self._rows is not None:
            self._rows = None
            self._mapping.close()


class ShmLanding:
    """Shares the pool with one peer process and watches it."""

    name = NAME
    inline = False

    def __init__(self, sock: socket.socket, shared_fd: int) -> None:
        """Raises TransferError unless the peer is ours and its death can be proven."""
        self.shared_fd: int | None = shared_fd
        pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        if uid != os.getuid():
            raise TransferError(f"peer has user id {uid}, not {os.getuid()}")
        self._pidfd: int | None = _open_pidfd(sock, pid)

    async def peer_dead(self) -> None:
        """Returns once the peer process has ended."""
        if self._pidfd is not None:
            await readable(self._pidfd)

    def close(self) -> None:
        """Closes the pidfd."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def _open_pidfd(sock: socket.socket, pid: int) -> int:
    with contextlib.suppress(OSError):  # before Linux 6.5
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise TransferError(f"cannot watch peer process {pid}: {error.strerror}") from error
