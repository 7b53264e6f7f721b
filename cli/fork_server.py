"""A process that has imported what workers import, and forks one whenever it is asked: the parent's side.

Importing torch takes most of a worker's start. Here it is done once per `tandem serve`, while the router starts, and a
worker that ends has its successor at once. What was imported is memory that all of them share.

A child is forked twice, and the process in between ends: the kernel then gives it to the nearest ancestor that adopts,
which is this process for as long as `fork` takes. So it is a child as any other is, and the end of the fork server ends
none. Where anything of this fails, `fork` gives None, and children are started from nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import IO

from cli.launch import fork_server_command, orders
from shell.telemetry.logging import get_logger

_log = get_logger(__name__)

_PR_SET_CHILD_SUBREAPER = 36
_PATIENCE_S = 10.0
"""A fork takes milliseconds. This blocks the caller, which only waits for children anyhow."""
_IMPORTED_WITHIN_S = 300.0
_PID_BYTES = 16


class ForkedProcess:
    """A child of this process. `wait` is called once, by any thread; the rest as of `subprocess.Popen`."""

    def __init__(self, pid: int, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        """Takes over the pipes. Raises OSError if there is no such process."""
        self.pid = pid
        self.stdout: IO[bytes] | None = stdout
        self.stderr: IO[bytes] | None = stderr
        self._pidfd = os.pidfd_open(pid)  # names it for good, whoever has its number later
        weakref.finalize(self, os.close, self._pidfd)

    def wait(self) -> int:
        """Its exit code once it has ended; negative = a signal."""
        end = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        assert end is not None
        return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status

    def terminate(self) -> None:
        """Asks it to end. A no-op once it has."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it. A no-op once it has ended."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)


class ForkServer:
    """`start`, `ready`, then `fork` as often as wanted; `close` ends it, and none of those that it forked."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._is_ready = False

    def start(self) -> None:
        """Returns at once; it imports meanwhile. On systems other than Linux there is none."""
        if sys.platform != "linux":
            return
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                fork_server_command(), stdin=theirs.fileno(), stdout=subprocess.DEVNULL, process_group=0
            )

    async def ready(self) -> bool:
        """Whether there is one, once it has imported everything or has ended."""
        if self._orders is None:
            return False
        self._orders.setblocking(False)
        said = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_IMPORTED_WITHIN_S):
                said = await asyncio.get_running_loop().sock_recv(self._orders, _PID_BYTES)
        if not said:
            self.close()
            return False
        self._orders.settimeout(_PATIENCE_S)
        self._is_ready = True
        return True

    def fork(self, command: Sequence[str]) -> ForkedProcess | None:
        """The child that this `launch_command` would start; None if there is no server that is ready.

        Raises OSError if this process can open no more files.
        """
        if self._orders is None or not self._is_ready:
            return None
        with contextlib.ExitStack() as unless_forked:
            stdout, stderr = _pipe(unless_forked), _pipe(unless_forked)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.settimeout(_PATIENCE_S)
            try:
                with ours, theirs, stdout[1], stderr[1], _adopting():
                    descriptors = [theirs.fileno(), stdout[1].fileno(), stderr[1].fileno()]
                    socket.send_fds(self._orders, [orders(command)], descriptors)
                    theirs.close()
                    pid = int(ours.recv(_PID_BYTES))
                    ours.send(b"go")
                child = ForkedProcess(pid, stdout[0], stderr[0])
            except (OSError, ValueError):  # it has ended, or stands still
                _log.warning("the fork server does not answer: from now on workers start from nothing")
                self.close()
                return None
            unless_forked.pop_all()
            return child

    def close(self) -> None:
        """Idempotent."""
        if self._process is not None:
            self._process.kill()  # first: a socket that closes with words unread would be an error there
            self._process.wait()
            self._process = None
        if self._orders is not None:
            self._orders.close()
            self._orders = None


def _pipe(stack: contextlib.ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """Both ends, unbuffered, which `stack` closes."""
    reading, writing = os.pipe()
    return (
        stack.enter_context(open(reading, "rb", buffering=0)),
        stack.enter_context(open(writing, "wb", buffering=0)),
    )


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Descendants whose parents end are children of this process while inside."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)
