"""`tandem status --watch` as a person runs it: in a terminal, through a router's restart, until ctrl-C."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from bench.support.cluster import Cluster, run_command

TIMEOUT_S = 30.0
COMMAND = (sys.executable, "-m", "cli.main", "status", "--watch", "0.2", "--target")


class Terminal:
    """The other end of a pseudo-terminal in which the command runs."""

    def __init__(self, target: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen([*COMMAND, target], stdout=slave, stderr=slave, stdin=slave)
        os.close(slave)
        self.seen = ""

    def sees(self, text: str) -> bool:
        """Whether the text appears, from here on, within the time."""
        start = len(self.seen)
        deadline = time.monotonic() + TIMEOUT_S
        while text not in self.seen[start:]:
            left = deadline - time.monotonic()
            if left < 0 or not select.select([self._master], [], [], left)[0]:
                return False
            try:
                self.seen += os.read(self._master, 65536).decode(errors="replace")
            except OSError:  # the command has ended
                return text in self.seen[start:]
        return True

    def interrupt(self) -> int:
        """Ctrl-C; the exit code."""
        self.process.send_signal(signal.SIGINT)
        self.sees("\x1b[?1049l")
        return self.process.wait(TIMEOUT_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture(autouse=True)
def ctrl_c_is_heard() -> Iterator[None]:
    """A shell that starts the tests in the background has them ignore it, and so would the commands that they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def router() -> Iterator[Cluster]:
    """A router without workers."""
    with run_command("router", "--model", "demo", "--listen", "127.0.0.1:0", "--drain-grace-seconds", "0") as running:
        yield running


def test_it_outlasts_the_routers_restart_and_leaves_the_terminal_as_it_was(router: Cluster) -> None:
    terminal = Terminal(router.target)
    try:
        assert terminal.sees("model demo, not ready: no decode worker")
        router.stop()
        assert terminal.sees("unreachable for")
        with run_command("router", "--model", "demo", "--listen", router.target):
            assert terminal.sees("model demo, not ready: no decode worker")
            assert terminal.interrupt() == 0
        assert terminal.seen.startswith("\x1b[?1049h")
        assert terminal.seen.rstrip().endswith("\x1b[?1049l")
        assert "Traceback" not in terminal.seen
    finally:
        terminal.close()


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_into_a_pipe_it_prints_frame_after_frame(router: Cluster, ending: signal.Signals) -> None:
    with subprocess.Popen(
        [*COMMAND, router.target], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        heads = [line for line in (process.stdout.readline() for _ in range(20)) if line.startswith("tandem ")]
        process.send_signal(ending)
        rest, errors = process.communicate(timeout=TIMEOUT_S)
    assert len(heads) >= 3
    assert (process.returncode, errors) == (0, "")
    assert "\x1b" not in "".join([*heads, rest])
