"""`tandem serve` as a child process: started, waited for, stopped. For benchmarks and end-to-end tests."""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """A served model: the supervisor's process and the router's address."""

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


def command(model: str, options: Sequence[str]) -> list[str]:
    """The command line of `tandem serve` on a free loopback port."""
    return [
        *(sys.executable, "-m", "tandem.cli.main", "serve"),
        *("--model", model, "--listen", "127.0.0.1:0", *options),
    ]


@contextlib.contextmanager
def serve(model: str, *options: str) -> Iterator[Cluster]:
    """Serves `model` until the block ends. Raises RuntimeError with the log if it does not get ready."""
    process = subprocess.Popen(
        command(model, options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
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
    raise RuntimeError(f"tandem serve (pid {process.pid}) did not get ready:\n" + "".join(log))


def _read(stream: IO[str], take: Callable[[str], object]) -> None:
    for line in stream:
        take(line)
    take("")
