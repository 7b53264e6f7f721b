import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.launch import launch_command
from cli.supervisor import Child, open_process

DEADLINE_S = 20.0
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="affinity and parent-death signals are Linux's")


@pytest.fixture
async def start() -> Any:
    children: list[Child] = []

    def started(command: list[str], sink: Callable[[str], None] = lambda line: None) -> Child:
        children.append(Child(open_process(command), sink))
        return children[-1]

    yield started
    for child in children:
        child.kill()
        await asyncio.wait_for(child.wait(), DEADLINE_S)


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


async def test_the_ready_line_is_found_among_others_and_stderr_is_passed_on(start: Any) -> None:
    program = "import sys; print('hello'); print('ready 127.0.0.1:7'); print('one\\n\\ntwo', file=sys.stderr)"
    lines: list[str] = []
    child = start(python(program), lines.append)
    assert await asyncio.wait_for(child.ready(), DEADLINE_S) == "127.0.0.1:7"
    assert await asyncio.wait_for(child.wait(), DEADLINE_S) == 0
    assert lines == ["one", "", "two"]
    assert child.last_words == "two"


async def test_a_child_that_ends_early_is_never_ready(start: Any) -> None:
    child = start(python("raise SystemExit(2)"))
    assert await asyncio.wait_for(child.ready(), DEADLINE_S) is None
    assert await asyncio.wait_for(child.wait(), DEADLINE_S) == 2


@pytest.mark.parametrize("called", [Child.ready, Child.wait])
async def test_a_child_has_ended_though_a_process_of_its_own_holds_its_output(
    start: Any, called: Callable[[Child], Any]
) -> None:
    program = """
import os, subprocess, sys
holding = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(holding.pid, file=sys.stderr, flush=True)
os._exit(3)
"""
    lines: list[str] = []
    child = start(python(program), lines.append)
    try:
        await asyncio.wait_for(called(child), DEADLINE_S)
        assert await child.wait() == 3
    finally:
        os.kill(int(lines[0]), signal.SIGKILL)


async def test_an_overlong_line_does_not_stop_the_reading(start: Any) -> None:
    program = "import sys; sys.stderr.write('x' * 3_000_000 + '\\n' + 'end\\n')"
    child = start(python(program))
    assert await asyncio.wait_for(child.wait(), DEADLINE_S) == 0
    assert child.last_words == "end"


async def test_terminate_and_kill_are_noops_once_it_has_ended(start: Any) -> None:
    child = start(python("pass"))
    await asyncio.wait_for(child.wait(), DEADLINE_S)
    child.terminate()
    child.kill()


@LINUX
async def test_a_launched_child_has_its_cores_and_priority(start: Any) -> None:
    cores = sorted(os.sched_getaffinity(0))[:1]
    child = start(launch_command("platform", ["--terse"], cores, 5))
    assert await asyncio.wait_for(child.wait(), DEADLINE_S) == 0
    program = "import os; print('ready', sorted(os.sched_getaffinity(0)), os.getpriority(os.PRIO_PROCESS, 0))"
    bound = [*launch_command("timeit", ["-n1", "-r1", program], cores, 5)]
    child = start(bound)
    assert await asyncio.wait_for(child.ready(), DEADLINE_S) == f"{cores} {os.getpriority(os.PRIO_PROCESS, 0) + 5}"


@LINUX
def test_a_file_in_the_working_directory_is_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "calendar.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    command = launch_command("calendar", ["2026", "11"], sorted(os.sched_getaffinity(0)), 0)
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


@LINUX
async def test_a_child_hears_no_ctrl_c_and_is_scheduled_with_its_parent(start: Any) -> None:
    """A terminal interrupts the process group in front; some kernels schedule each session as a whole."""
    program = "import os; print('ready', os.getpgid(0) == os.getpid(), os.getsid(0))"
    child = start(python(program))
    assert await asyncio.wait_for(child.ready(), DEADLINE_S) == f"True {os.getsid(0)}"


@LINUX
async def test_a_launched_child_sees_its_own_gpu_first(start: Any) -> None:
    cores = sorted(os.sched_getaffinity(0))[:1]
    program = "import os; print('ready', os.environ['CUDA_VISIBLE_DEVICES'])"
    child = start(launch_command("timeit", ["-n1", "-r1", program], cores, 0, ("GPU-b", "GPU-a")))
    assert await asyncio.wait_for(child.ready(), DEADLINE_S) == "GPU-b,GPU-a"


@LINUX
def test_a_launched_child_dies_with_its_parent() -> None:
    parent_program = f"""
import subprocess, sys, time
from cli.launch import launch_command
command = launch_command("timeit", ["-n1", "-r1", "print('up', flush=True); import time; time.sleep({DEADLINE_S})"], [
    {min(os.sched_getaffinity(0))}], 0)
child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep({DEADLINE_S})
"""
    parent = subprocess.Popen([sys.executable, "-c", parent_program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        pidfd = os.pidfd_open(int(parent.stdout.readline()))
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        try:
            assert wait_for_end(pidfd)
        finally:
            os.close(pidfd)


def wait_for_end(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(DEADLINE_S * 1000))
