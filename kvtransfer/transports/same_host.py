"""What transports between processes of one machine and one user have in common: they meet at an abstract Unix socket.

The receiver passes descriptors of the memory that the sender is to map with its HELLO (SCM_RIGHTS), so that a killed
process leaves nothing behind. Only a peer with our own user id gets them. Since the peer itself then writes, its
connection's end proves nothing; an orderly BYE does, or its process's death, watched through a pidfd that is taken from
the socket.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import sys
from collections.abc import Callable, Sequence

from kvtransfer.connection import Connection
from kvtransfer.device_work import DeviceWork
from kvtransfer.frame import HEADER_BYTES, Frame
from kvtransfer.handshake import MAX_RANKS
from kvtransfer.pool import Pool
from kvtransfer.transport import Acceptor, Fields, ReceivingLane
from kvtransfer.transports.host import connected, listening
from kvtransfer.wire import readable
from tandem.errors import ConfigError, PeerLost, TransferError

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


def namespace(kind: str) -> str:
    """Names this process's namespace of a kind, `net` or `pid`; empty if unknown."""
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
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


async def receive_with_descriptors(connection: Connection) -> tuple[Frame, list[int]]:
    """The connection's first frame and the descriptors passed with it, owned by the caller."""
    await readable(connection.sock)
    try:
        first, descriptors, _, _ = socket.recv_fds(connection.sock, HEADER_BYTES, MAX_RANKS, socket.MSG_CMSG_CLOEXEC)
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
    return frame, descriptors


def acceptor(accept: Callable[[socket.socket], ReceivingLane], fields: Fields) -> Acceptor:
    """A listening end under a name of its own; `fields` are the transport's, beside those that `elsewhere` reads.

    Raises ConfigError.
    """
    name = f"tandem-kv-{secrets.token_hex(16)}"
    reach = {
        "unix_name": name,
        "boot_id": boot_id(),
        "uid": str(os.getuid()),
        "net_ns": namespace("net"),
        "pid_ns": "" if _knows_peer_pidfd() else namespace("pid"),
        **fields,
    }
    return Acceptor(listen(name), reach, accept)


def elsewhere(fields: Fields) -> str | None:
    """Why the acceptor with these fields is out of reach; None = within reach."""
    here = boot_id()
    if not here or fields.get("boot_id") != here:
        return "it is on another machine"
    if fields.get("uid") != str(os.getuid()):
        return "it belongs to another user"
    if fields.get("net_ns") != namespace("net"):
        return "it is in another network namespace, where its Unix socket cannot be reached"
    if fields.get("pid_ns") not in ("", namespace("pid")):
        return "it is in another PID namespace, where it could not watch this process: that needs Linux 6.5"
    return None


def cannot_watch() -> str | None:
    """Why a peer's death cannot be proven on this system; None = it can."""
    if sys.platform != "linux":
        return f"needs Linux, this is {sys.platform}"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return f"needs pidfd: {error.strerror}"
    return None


class SharingLane(ReceivingLane):
    """Shares memory with a peer process and watches that process through a pidfd."""

    peer_writes = True

    def __init__(
        self, pool: Pool, shared_fds: Sequence[int], sock: socket.socket, work: DeviceWork | None = None
    ) -> None:
        """Raises TransferError unless the peer is ours and its death can be proven."""
        super().__init__(pool, work)
        self._shared_fds = shared_fds
        pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        if uid != os.getuid():
            raise TransferError(f"peer has user id {uid}, not {os.getuid()}")
        self._pidfd: int | None = _open_pidfd(sock, pid)

    def send_hello(self, connection: Connection, hello: Frame) -> None:
        """See `ReceivingLane`: the descriptors go with the frame."""
        data = hello.encode()  # the first frame: nothing is queued before it
        try:
            sent = socket.send_fds(connection.sock, [data], self._shared_fds)
        except OSError as error:
            raise PeerLost(f"cannot pass the pool's descriptors: {error.strerror}") from error
        if sent != len(data):
            raise PeerLost("the peer's buffer is full before the handshake")

    async def peer_dead(self) -> None:
        """See `ReceivingLane`: the pidfd says so."""
        if self._pidfd is not None:
            await readable(self._pidfd)

    def close(self) -> None:
        """See `Lane`."""
        super().close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def _knows_peer_pidfd() -> bool:
    """Whether a socket gives a pidfd of its peer, whatever PID namespace that is in."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        try:
            os.close(ours.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
        except OSError:
            return False
    return True


def _open_pidfd(sock: socket.socket, pid: int) -> int:
    with contextlib.suppress(OSError):  # before Linux 6.5
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise TransferError(f"cannot watch peer process {pid}: {error.strerror}") from error
