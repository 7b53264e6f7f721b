from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal
pid = os.getpid()
os.getpid = lambda: {seen}
import cli
os.kill(pid, signal.SIGTERM)
"""


@pytest.mark.parametrize(
    ("seen", "code"),
    [pytest.param("1", 128 + signal.SIGTERM, id="first"), pytest.param("pid", -signal.SIGTERM, id="any-other")],
)
def test_a_process_that_is_starting_ends_by_sigterm(seen: str, code: int) -> None:
    program = [sys.executable, "-c", PROGRAM.format(seen=seen)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)

    assert (ended.returncode, ended.stderr) == (code, "")
