"""Shared memory: the receiver's pool lies in a memfd, which the sender maps and writes into.

The descriptor travels over an abstract Unix socket (SCM_RIGHTS), so that a killed process
leaves nothing behind. Only a peer with our own user id gets it. Since the peer writes by
itself, its connection's end proves nothing; an orderly BYE does, or its process's death,
watched through a pidfd taken from the socket.

The pool's row 0 lies at byte 0 of the memfd.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
import struct
import sys
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from kvtransfer.base import BlockRef
from kvtransfer.connection import Connection
from kvtransfer.fields import required
from kvtransfer.frame import HEADER_BYTES, Frame
from kvtransfer.handshake import Hello
from kvtransfer.local_pool import LocalPool, Rows
from kvtransfer.transport import Acceptor, Fields, ListenOptions, SendingLane, TransportStatus
from kvtransfer.transports.host import HostReceivingLane, HostSendingLane, connected, host_status, listening
from kvtransfer.wire import readable
from tandem.errors import ConfigError, PeerLost, TransferError
from tandem.security.tls import ClientTls
from tandem.types import BlockId

NAME = "shm"
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
    try:
        return listening(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), "\0" + name)
    except OSError as error:
        raise ConfigError("transport", f"cannot listen on a Unix socket: {error}") from error


async def dial(name: str) -> socket.socket:
    """A connected socket; the caller sets the deadline. Raises OSError."""
    return await connected(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), "\0" + name)


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


class ShmTransport:
    """Implements `transport.Transport`. Plain: the kernel names the peer's user, and nothing leaves the machine."""

    name = NAME

    def probe(self, device: torch.device) -> TransportStatus:
        """See `Transport`."""
        if sys.platform != "linux":
            return TransportStatus(NAME, False, f"needs Linux, this is {sys.platform}")
        try:
            os.close(os.memfd_create("tandem-probe"))
            os.close(os.pidfd_open(os.getpid()))
        except OSError as error:
            return TransportStatus(NAME, False, f"needs memfd and pidfd: {error.strerror}")
        return host_status(NAME, device, "sender writes into the receiver's memory on the same machine")

    def listen(self, pool: LocalPool, options: ListenOptions) -> Acceptor:
        """See `Transport`."""
        if pool.shared_fd is None:
            raise ConfigError("transport", "shm needs a pool in shared memory")
        name, accept = f"tandem-kv-{secrets.token_hex(16)}", partial(_ReceivingLane, pool, pool.shared_fd)
        return Acceptor(listen(name), {"unix_name": name, "boot_id": boot_id(), "uid": str(os.getuid())}, accept)

    def unreachable(self, pool: LocalPool, fields: Fields) -> str | None:
        """See `Transport`."""
        here = boot_id()
        if not here or fields.get("boot_id") != here:
            return "it is on another machine"
        if fields.get("uid") != str(os.getuid()):
            return "it belongs to another user"
        return None

    async def dial(self, pool: LocalPool, fields: Fields, tls: ClientTls | None) -> tuple[socket.socket, SendingLane]:
        """See `Transport`."""
        return await dial(required(fields, "unix_name")), _SendingLane(pool)


class _SendingLane(HostSendingLane):
    """Copies blocks into the peer's rows, mapped by the descriptor that came with its HELLO."""

    name = NAME

    def __init__(self, pool: LocalPool) -> None:
        super().__init__(pool)
        self._descriptor: int | None = None
        self._mapping: mmap.mmap | None = None
        self._rows: Rows | None = None

    async def receive_hello(self, connection: Connection) -> Frame:
        frame, self._descriptor = await receive_with_descriptor(connection)
        return frame

    def attach(self, theirs: Hello, verify: str) -> None:
        if self._descriptor is None:
            raise TransferError("the peer did not share its memory")
        size_bytes = theirs.num_blocks * self._pool.block_bytes
        try:
            if os.fstat(self._descriptor).st_size < size_bytes:
                raise TransferError("the peer's shared memory is smaller than its pool")
            self._mapping = mmap.mmap(self._descriptor, size_bytes)
        except (OSError, ValueError) as error:
            raise TransferError(f"cannot map the peer's pool: {error}") from error
        # A child forked by this process must not be able to write there after we are gone.
        self._mapping.madvise(mmap.MADV_DONTFORK)
        self._rows = np.frombuffer(self._mapping, np.uint8).reshape(theirs.num_blocks, self._pool.block_bytes)
        self._close_descriptor()

    def close(self) -> None:
        self._close_descriptor()
        self._rows = None
        if self._mapping is not None:
            self._mapping.close()

    def _place(self, sources: Sequence[BlockId], targets: Sequence[BlockRef]) -> tuple[int, ...]:
        """Checksums each source, then copies it, while it is in the processor's cache."""
        rows = self._rows
        if rows is None:
            raise PeerLost("the mapping of the peer's pool is closed")
        checksums: list[int] = []
        for source, target in zip(sources, targets, strict=True):
            checksums.extend(self._pool.checksums((source,)))
            np.copyto(rows[target.block_id], self._pool.rows[source])
        return tuple(checksums)

    def _close_descriptor(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class _ReceivingLane(HostReceivingLane):
    """Shares the rows with one peer process and watches that through a pidfd."""

    name = NAME

    def __init__(self, pool: LocalPool, shared_fd: int, sock: socket.socket) -> None:
        """Raises TransferError unless the peer is ours and its death can be proven."""
        super().__init__(pool)
        self._shared_fd = shared_fd
        pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        if uid != os.getuid():
            raise TransferError(f"peer has user id {uid}, not {os.getuid()}")
        self._pidfd: int | None = _open_pidfd(sock, pid)

    def send_hello(self, connection: Connection, hello: Frame) -> None:
        data = hello.encode()  # the first frame: nothing is queued before it
        try:
            sent = socket.send_fds(connection.sock, [data], [self._shared_fd])
        except OSError as error:
            raise PeerLost(f"cannot pass the pool's descriptor: {error.strerror}") from error
        if sent != len(data):
            raise PeerLost("the peer's buffer is full before the handshake")

    async def peer_dead(self) -> None:
        if self._pidfd is not None:
            await readable(self._pidfd)

    def close(self) -> None:
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
