"""`tandem` commands as forks of one process that has imported what all of them import, once per process of pytest.

Importing torch takes most of what a short test of real processes costs. A command that is forked runs the same `main`
with the same words and environment; so do the processes that `tandem serve` starts, by its own fork server. What else
differs from a command that the shell starts: nothing is imported anew. Tests of that start real ones (`real_commands`).

This file is imported on the side of pytest, and run as a module on the other: as the process that forks, and, in each
that it forked, as the command.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from setproctitle import setproctitle

import cli.fork_server
import cli.main
import cli.serve
from cli import launch
from cli.fork_server import ForkedProcess, ForkServer

ROOT = Path(__file__).parents[1]
_MODULE = "tests.forked_commands"
_FORK = "--fork-server"


class ForkedCommand:
    """What `bench.support.cluster` and its tests ask of a `subprocess.Popen`, of a child that was forked."""

    def __init__(self, child: ForkedProcess) -> None:
        assert child.stdout is not None
        assert child.stderr is not None
        self._child = child
        self._reaping = threading.Lock()
        self.pid = child.pid
        self.returncode: int | None = None
        self.stdout: IO[str] = io.TextIOWrapper(io.BufferedReader(child.stdout))  # type: ignore[arg-type]
        self.stderr: IO[str] = io.TextIOWrapper(io.BufferedReader(child.stderr))  # type: ignore[arg-type]
        self.kill, self.terminate = child.kill, child.terminate

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        with self._reaping:
            if self.returncode is None:
                self.returncode = self._ended_within(timeout)
            return self.returncode

    def _ended_within(self, timeout: float | None) -> int:
        pidfd = os.pidfd_open(self.pid)
        try:
            ends = select.poll()
            ends.register(pidfd, select.POLLIN)
            if not ends.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("tandem", timeout or 0)
        finally:
            os.close(pidfd)
        return self._child.wait()


class Forking:
    """Forks `tandem` commands for the tests of this process."""

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self._one_at_a_time = threading.Lock()

    def __call__(self, *arguments: str) -> ForkedCommand:
        """In place of `bench.support.cluster.open_command`."""
        words = json.dumps([dict(os.environ), os.getcwd(), *arguments])
        command = launch.launch_command(_MODULE, (words,), sorted(os.sched_getaffinity(0)), nice=0)
        with self._one_at_a_time:
            child = self._server.fork(command)
        assert child is not None, "the process that forks commands has ended"
        return ForkedCommand(child)


@contextlib.contextmanager
def forking() -> Iterator[Forking]:
    """Entered by the main thread: what it starts ends with the thread that did."""
    server = ForkServer()
    with _replaced_command(), contextlib.chdir(ROOT):
        server.start()
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        assert runner.run(server.ready())
    try:
        yield Forking(server)
    finally:
        server.close()


@contextlib.contextmanager
def _replaced_command() -> Iterator[None]:
    product = cli.fork_server.fork_server_command
    cli.fork_server.fork_server_command = lambda: [
        *(sys.executable, "-m", _MODULE, "--parent", str(os.getpid()), _FORK)
    ]
    try:
        yield
    finally:
        cli.fork_server.fork_server_command = product


def _run_command(environment: dict[str, str], folder: str, *arguments: str) -> int:
    """In the forked process."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if arguments[0] == "serve":
        _fork_the_fork_server()
    sys.argv = ["tandem", *arguments]
    setproctitle(" ".join([sys.executable, "-m", "cli.main", *arguments]))
    return cli.main.main()


def _fork_the_fork_server() -> None:
    """The one of `tandem serve`, as long as there are no threads; routers too are forked by it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if (pid := launch._forked()) == 0:
        ours.close()
        os.setpgid(0, 0)
        os.dup2(theirs.fileno(), 0)
        theirs.close()
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
        if "STANDIN_CUDA_DELAY_US" in os.environ:
            _keep_pools_on_the_stand_in()
        sys.argv = ["cli.launch", "--parent", str(parent), _FORK]
        setproctitle(" ".join([sys.executable, "-m", *sys.argv]))
        launch.main()
        os._exit(0)
    theirs.close()

    def start(server: ForkServer) -> None:
        server._orders, server._process, server._is_ready = ours, _Process(pid), True  # type: ignore[assignment]

    ForkServer.start = start  # type: ignore[method-assign]
    cli.serve.FORKED = (*launch.FORKED, "router")


def _keep_pools_on_the_stand_in() -> None:
    """From now on workers that are forked do, as by `tests/standins/site` those that are started."""
    from tests.standins.cuda import pools_lie_here
    from tests.standins.nccl import communicators_begin_here

    run_module = runpy.run_module

    def run(name: str, **options: Any) -> dict[str, Any]:
        if name in launch.FORKED:
            pools_lie_here()
            communicators_begin_here()
        return run_module(name, **options)

    runpy.run_module = run  # type: ignore[assignment]


class _Process:
    """What `ForkServer` asks of its `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> None:
        os.waitpid(self._pid, 0)


if __name__ == "__main__":
    if _FORK in sys.argv:
        import router.app  # noqa: F401

        launch.main()
    else:
        sys.exit(_run_command(*json.loads(sys.argv[1])))
