"""`tandem serve` as a child process: started, waited for, looked at, stopped. For benchmarks and end-to-end tests."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tandem.client import Client
from tandem.types import Role, WorkerLoad

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.02
_LAST_WORDS = 40
"""Lines of the log that go with an error."""

_FLEET = ("--workers", "--prefill", "--decode")
"""Options that say which workers there are."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running command: its process and the address that it serves on; for `tandem serve`, the router's."""

    process: subprocess.Popen[str]
    target: str
    log: list[str]
    """Everything that the processes wrote to standard error so far."""

    def stop(self) -> int:
        """Asks for an orderly end and returns the exit code. Raises TimeoutExpired, after killing, if it hangs."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


def serve(model: str, *options: str, checkout: Path | None = None) -> contextlib.AbstractContextManager[Cluster]:
    """`tandem serve` on a free loopback port, until the block ends; one prefill and one decode worker by default.

    `checkout`: another installed checkout (`make install`), whose server is started with its own interpreter.
    """
    fleet = () if any(each.split("=")[0] in _FLEET for each in options) else ("--prefill", "1", "--decode", "1")
    arguments = ("serve", "--model", model, "--listen", "127.0.0.1:0", *fleet, *options)
    return run_command(*arguments) if checkout is None else _running(_open_there(checkout, *arguments))


def open_command(*arguments: str) -> subprocess.Popen[str]:
    """Starts a `tandem` command with pipes for what it writes. End-to-end tests put another way in its place."""
    return subprocess.Popen(
        [sys.executable, "-m", "cli.main", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    )


def _open_there(checkout: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(checkout / ".venv" / "bin" / "python"), "-m", "cli.main", *arguments],
        cwd=checkout,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    )


def run_command(*arguments: str) -> contextlib.AbstractContextManager[Cluster]:
    """Any `tandem` command that says `ready HOST:PORT`. Raises RuntimeError with the log if it does not get ready."""
    return _running(open_command(*arguments))


@contextlib.contextmanager
def _running(process: subprocess.Popen[str]) -> Iterator[Cluster]:
    assert process.stdout is not None
    assert process.stderr is not None
    log: list[str] = []
    ready: queue.Queue[str] = queue.Queue()
    readers = [
        threading.Thread(target=_read, args=(process.stderr, log.append), daemon=True),
        threading.Thread(target=_read, args=(process.stdout, ready.put), daemon=True),
    ]
    for reader in readers:
        reader.start()
    try:
        yield Cluster(process, _wait_ready(process, ready, log), log)
    except Exception as error:
        error.add_note("the processes' last words:\n" + "".join(log[-_LAST_WORDS:]))
        raise
    finally:
        if process.poll() is None:
            Cluster(process, "", log).stop()
        for reader in readers:
            reader.join()
        process.stdout.close()
        process.stderr.close()


def _wait_ready(process: subprocess.Popen[str], lines: queue.Queue[str], log: list[str]) -> str:
    """Returns HOST:PORT from the line `ready HOST:PORT`; "" marks the end of output."""
    try:
        line = lines.get(timeout=START_TIMEOUT_S)
    except queue.Empty:
        line = ""
    if line.startswith("ready "):
        return line.split()[1]
    raise RuntimeError(f"tandem (pid {process.pid}) did not get ready:\n" + "".join(log))


def _read(stream: IO[str], take: Callable[[str], object]) -> None:
    for line in stream:
        take(line)
    take("")


def eventually(condition: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    """Whether the condition comes true within the time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def becomes_idle(client: Client, timeout_s: float = 30.0) -> bool:
    """Whether, within the time, every worker reports anew that nobody holds a block and nothing waits or runs."""
    asked_s = time.monotonic()

    def idle() -> bool:
        status = client.status()
        return status.active_requests == status.queued_requests == 0 and all(
            worker.heartbeat_age_s < time.monotonic() - asked_s and _holds_nothing(worker.load)
            for worker in status.workers
        )

    return eventually(idle, timeout_s)


def _holds_nothing(load: WorkerLoad) -> bool:
    pool = load.pool
    return pool.free + pool.cached == pool.total and load.waiting_seqs == load.running_seqs == load.live_transfers == 0


def pid_of(client: Client, role: Role) -> int:
    """Process id of the one worker with this role, once it is registered."""

    def pids() -> list[int]:
        return [worker.info.pid for worker in client.status().workers if worker.info.role == role]

    eventually(lambda: bool(pids()))
    (pid,) = pids()
    return pid
