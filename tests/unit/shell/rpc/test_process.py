from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from shell.rpc.process import StopSignal, run_process
from tandem.errors import CheckpointError, ConfigError, InternalError

STUBBORN = """
import asyncio
from shell.rpc.process import run_process
async def main(stop):
    stop.on_abort(lambda: print("aborted", flush=True))
    print("up", flush=True)
    await stop.wait()
    print("stopping", flush=True)
    await asyncio.Event().wait()
run_process(main)
"""

LOADING = """
import threading
from shell.rpc.process import run_process
def load():
    print("loading", flush=True)
    threading.Event().wait()
async def main(stop):
    await stop.unless_stopped(load)
run_process(main)
"""


def test_the_first_signal_asks_and_main_ends_in_order() -> None:
    ended: list[str] = []

    async def main(stop: StopSignal) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.wait()
        ended.append("in order")

    assert run_process(main) == 0
    assert ended == ["in order"]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("--listen", "in use"), 2, "tandem: --listen: in use\n"),
        (CheckpointError("config.json: no such file"), 2, "tandem: config.json: no such file\n"),
        (InternalError("at start"), 1, "tandem: at start\n"),
        (
            ExceptionGroup("tasks", [ExceptionGroup("more", [ConfigError("--model", "bad")])]),
            2,
            "tandem: --model: bad\n",
        ),
    ],
)
def test_an_error_of_ours_is_one_line_and_an_exit_code(
    capsys: pytest.CaptureFixture[str], error: Exception, code: int, line: str
) -> None:
    async def main(stop: StopSignal) -> None:
        raise error

    assert run_process(main) == code
    assert capsys.readouterr().err == line


def test_any_other_error_is_a_bug_and_not_hidden() -> None:
    async def main(stop: StopSignal) -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        run_process(main)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_ends_the_process_at_once(signum: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "up\n"
            process.send_signal(signum)
            assert process.stdout.readline() == "stopping\n"
            process.send_signal(signum)
            assert process.stdout.readline() == "aborted\n"
            assert process.wait(timeout=30) == 128 + signum
        finally:
            process.kill()


def test_a_stop_does_not_wait_for_what_is_being_loaded() -> None:
    with subprocess.Popen([sys.executable, "-c", LOADING], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "loading\n"
            process.terminate()
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()


async def test_what_was_loaded_is_handed_on_and_an_error_too() -> None:
    assert await StopSignal().unless_stopped(lambda: "engine") == "engine"

    def fail() -> None:
        raise CheckpointError("config.json: no such file")

    with pytest.raises(CheckpointError):
        await StopSignal().unless_stopped(fail)


def test_it_runs_on_uvloop() -> None:
    loops: list[str] = []

    async def main(stop: StopSignal) -> None:
        loops.append(type(asyncio.get_running_loop()).__module__)

    run_process(main)

    assert loops[0].startswith("uvloop")
