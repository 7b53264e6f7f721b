import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cli import fork_server
from cli.fork_server import ForkedProcess, ForkServer
from cli.launch import launch_command

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="children are given to a parent that adopts")

PROGRAM = "import sys; from cli import launch; launch.FORKED = (); launch.main()"
"""As the true one, with nothing to import."""


def command(module: str, *arguments: str) -> list[str]:
    return launch_command(module, arguments, sorted(os.sched_getaffinity(0)), nice=0)


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ForkServer]:
    words = [sys.executable, "-c", PROGRAM, "--parent", str(os.getpid()), "--fork-server"]
    monkeypatch.setattr(fork_server, "fork_server_command", lambda: words)
    forking = ForkServer()
    forking.start()
    assert await forking.ready()
    yield forking
    forking.close()


def forked(server: ForkServer, module: str, *arguments: str) -> ForkedProcess:
    child = server.fork(command(module, *arguments))
    assert child is not None
    return child


def read(child: ForkedProcess) -> tuple[bytes, bytes]:
    """All that it writes to both its outputs, until it has ended."""
    assert child.stdout is not None
    assert child.stderr is not None
    with child.stdout, child.stderr:
        return child.stdout.read(), child.stderr.read()


def parent_of(child: ForkedProcess) -> int:
    return int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_file_in_the_working_directory_is_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "calendar.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    assert (
        subprocess.run(command("calendar", "2026", "11"), capture_output=True, timeout=60, check=False).returncode == 0
    )


async def test_children_run_their_modules_and_are_this_process_own(server: ForkServer) -> None:
    children = [forked(server, "calendar", "2026", "11"), forked(server, "calendar", "--no-such-option")]
    (calendar, _), (_, complaint) = [read(child) for child in children]
    assert b"November 2026" in calendar
    assert b"--no-such-option" in complaint
    assert [child.wait() for child in children] == [0, 2]


async def test_a_signal_ends_one_and_the_end_of_the_server_ends_none(server: ForkServer) -> None:
    children = [forked(server, "timeit", "-n", "1", "import time; time.sleep(60)") for _ in range(2)]
    server.close()
    assert server.fork(command("calendar")) is None
    for child in children:
        assert parent_of(child) == os.getpid()
        # Ctrl-C reaches this process alone, and the kernel weighs the threads of all of one session one by one.
        assert (os.getpgid(child.pid), os.getsid(child.pid)) == (child.pid, os.getsid(0))
    children[0].terminate()
    children[1].kill()
    assert [child.wait() for child in children] == [-signal.SIGTERM, -signal.SIGKILL]
    for child in children:
        child.kill()
        read(child)


async def test_one_that_has_ended_forks_nothing_any_more(server: ForkServer) -> None:
    assert server._process is not None
    server._process.kill()
    server._process.wait()
    assert server.fork(command("calendar")) is None


async def test_one_that_ends_while_it_imports_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "fork_server_command", lambda: [sys.executable, "-c", ""])
    forking = ForkServer()
    forking.start()
    assert forking.fork(command("calendar")) is None
    assert not await forking.ready()
    assert forking.fork(command("calendar")) is None


async def test_one_that_stands_still_is_done_without(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "_PATIENCE_S", 0.2)
    assert server._process is not None
    os.kill(server._process.pid, signal.SIGSTOP)
    assert server.fork(command("calendar")) is None
    assert server._process is None
