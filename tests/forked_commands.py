"""`tandem` commands as forks of one process that has imported what all of them import, once per process of pytest.

    pytest ─▶ fork server ─▶ each command; `tandem serve` ─▶ a fork server of its own ─▶ router and workers

Importing torch takes most of what a short test of real processes costs. A command that is forked runs the same `main`
with the same words and environment. What differs from a command that the shell starts: nothing is imported again.
Tests of how processes start use real ones (`real_commands`).

A child is forked twice, and the process in between ends: the kernel then gives the child to the nearest ancestor that
adopts, which is the process that asked. So it is a child as any other is, and outlives the fork server. This file is
imported by pytest, and run as a module: as the fork server, and, in each process that it forked, as the command.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from setproctitle import setproctitle

import cli.main
import cli.serve
from cli import launch
from cli.command import COMMANDS
from cli.supervisor import Process
from shell.parent import end_with

for _command in COMMANDS.values():  # `main` would import the module of its command in each fork
    importlib.import_module(_command.module)

ROOT = Path(__file__).parents[1]
WORKERS = ("prefill_worker", "decode_worker")
FORKED = (*WORKERS, "router")
"""Modules of the children of `tandem serve` that are forked."""
_MODULE = "tests.forked_commands"
_FORK_SERVER = "--fork-server"
_PR_SET_CHILD_SUBREAPER = 36
_DEADLINE_S = 60.0
_MAX_ORDER_BYTES = 1 << 17
_PID_BYTES = 16
_ADOPTED_POLL_S = 0.0005


class ForkedProcess:
    """A child of this process that was forked: `cli.supervisor.Process`."""

    def __init__(self, pid: int, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        """Takes over the pipes. Raises OSError if there is no such process."""
        self.pid = pid
        self.stdout: IO[bytes] | None = stdout
        self.stderr: IO[bytes] | None = stderr
        self.pidfd = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self.pidfd)

    def wait(self) -> int:
        """Returns the exit code; a negative one is a signal. Called once, by any thread."""
        end = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
        assert end is not None
        return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        """A no-op once the child has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)


class ForkServer:
    """This process's end of the socket at which a fork server takes orders."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._one_at_a_time = threading.Lock()
        orders.settimeout(_DEADLINE_S)

    def fork(self, command: Sequence[str]) -> ForkedProcess:
        """Returns the child that a `launch_command` would start, as a fork."""
        with contextlib.ExitStack() as unless_forked, self._one_at_a_time:
            stdout, stderr = _pipe(unless_forked), _pipe(unless_forked)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.settimeout(_DEADLINE_S)
            with ours, theirs, stdout[1], stderr[1], _adopting():
                descriptors = [theirs.fileno(), stdout[1].fileno(), stderr[1].fileno()]
                socket.send_fds(self._orders, [json.dumps(_launch_words(command)).encode()], descriptors)
                theirs.close()
                child = ForkedProcess(int(ours.recv(_PID_BYTES)), stdout[0], stderr[0])
            unless_forked.pop_all()
            return child


class ForkedCommand:
    """What `bench.support.cluster` and its tests use of a `subprocess.Popen`, of a child that was forked."""

    def __init__(self, child: ForkedProcess) -> None:
        self._child = child
        self._reaping = threading.Lock()
        self.pid = child.pid
        self.returncode: int | None = None
        self.stdout: IO[str] = io.TextIOWrapper(io.BufferedReader(child.stdout))  # type: ignore[arg-type]
        self.stderr: IO[str] = io.TextIOWrapper(io.BufferedReader(child.stderr))  # type: ignore[arg-type]
        self.kill, self.terminate, self.send_signal = child.kill, child.terminate, child.send_signal

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        with self._reaping:
            if self.returncode is None:
                ends = select.poll()
                ends.register(self._child.pidfd, select.POLLIN)
                if not ends.poll(None if timeout is None else timeout * 1000):
                    raise subprocess.TimeoutExpired("tandem", timeout or 0)
                self.returncode = self._child.wait()
            return self.returncode


class Forking:
    """Forks `tandem` commands for the tests of this process."""

    def __init__(self, server: ForkServer) -> None:
        self._server = server

    def __call__(self, *arguments: str) -> ForkedCommand:
        """In place of `bench.support.cluster.open_command`."""
        words = json.dumps([dict(os.environ), os.getcwd(), *arguments])
        command = launch.launch_command(_MODULE, (words,), sorted(os.sched_getaffinity(0)), nice=0)
        return ForkedCommand(self._server.fork(command))


@contextlib.contextmanager
def forking() -> Iterator[Forking]:
    """Entered by the main thread: children end with the thread that started them."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, _FORK_SERVER],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            process_group=0,
            cwd=ROOT,
        )
        theirs.close()
        try:
            yield Forking(ForkServer(ours))
        finally:
            process.kill()
            process.wait()


def _launch_words(command: Sequence[str]) -> Sequence[str]:
    """Returns the arguments of `cli.launch` in a `launch_command`."""
    return command[command.index("cli.launch") + 1 :]


def _pipe(stack: contextlib.ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """Returns both ends, unbuffered, which `stack` closes."""
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


# --- in the fork server ---


def _serve_forks(orders: socket.socket) -> None:
    """Returns when the parent has hung up."""
    for package in FORKED:
        importlib.import_module(f"{package}.app")
    gc.collect()
    gc.freeze()  # a collection in a child would copy what it walks
    while True:
        words, descriptors, _, _ = socket.recv_fds(orders, _MAX_ORDER_BYTES, 3)
        if not words:
            return
        if (pid := _forked()) == 0:
            orders.close()
            if _forked():
                os._exit(0)
            _become(json.loads(words), *descriptors)
        os.waitpid(pid, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def _forked() -> int:
    """As `os.fork`. The only other threads are numpy's, of which it takes care: Python warns of any."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _become(words: Sequence[str], asking: int, stdout: int, stderr: int) -> None:
    """Runs the module of a launch command in this process, and ends it."""
    options = launch.parsed(words)
    ends_s = time.monotonic() + _DEADLINE_S
    while os.getppid() != options.parent and time.monotonic() < ends_s:  # the process in between ends
        time.sleep(_ADOPTED_POLL_S)
    end_with(options.parent)
    os.setpgid(0, 0)
    for descriptor, number in ((stdout, 1), (stderr, 2)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    with socket.socket(fileno=asking) as asked:
        asked.send(str(os.getpid()).encode())
    launch.settle(options)
    sys.argv = [options.module, *options.arguments]
    setproctitle(" ".join([sys.executable, "-m", *sys.argv]))
    try:
        runpy.run_module(options.module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, int):  # to take apart what was imported would copy the memory that forks share
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code)
        raise
    sys.exit()


# --- in a command that was forked ---


def _run_command(environment: dict[str, str], folder: str, *arguments: str) -> int:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if arguments[0] == "serve":
        _fork_children()
    sys.argv = ["tandem", *arguments]
    setproctitle(" ".join([sys.executable, "-m", "cli.main", *arguments]))
    return cli.main.main()


def _fork_children() -> None:
    """Has this `tandem serve` fork its children, by a server that is forked here, before there are threads."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if _forked() == 0:
        ours.close()
        end_with(parent)
        os.setpgid(0, 0)
        setproctitle(f"{_MODULE} {_FORK_SERVER}")
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
        if "STANDIN_CUDA_DELAY_US" in os.environ:
            _keep_pools_on_the_stand_in()
        _serve_forks(theirs)
        os._exit(0)
    theirs.close()
    server, open_process = ForkServer(ours), cli.serve.open_process

    def forked_or_opened(command: Sequence[str]) -> Process:
        is_forked = launch.parsed(_launch_words(command)).module in FORKED
        return server.fork(command) if is_forked else open_process(command)

    cli.serve.open_process = forked_or_opened  # type: ignore[assignment]


def _keep_pools_on_the_stand_in() -> None:
    """From now on workers that are forked do, as by `tests/standins/site` those that are started."""
    from tests.standins.cuda import pools_lie_here
    from tests.standins.nccl import communicators_begin_here

    run_module = runpy.run_module

    def run(name: str, **options: Any) -> dict[str, Any]:
        if name in WORKERS:
            pools_lie_here()
            communicators_begin_here()
        return run_module(name, **options)

    runpy.run_module = run  # type: ignore[assignment]


if __name__ == "__main__":
    if _FORK_SERVER in sys.argv:
        orders = socket.socket(fileno=os.dup(sys.stdin.fileno()))
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), sys.stdin.fileno())
        _serve_forks(orders)
    else:
        sys.exit(_run_command(*json.loads(sys.argv[1])))
