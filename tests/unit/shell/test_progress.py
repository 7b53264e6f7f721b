from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from shell.progress import steps, track

PROGRAM = """
import sys
from shell.progress import show_on_terminal, steps, track
from shell.telemetry.logging import configure_logging, get_logger
configure_logging("test")
show_on_terminal()
for item in track("ab", "loading weights"):
    get_logger("test").info("an event", item=item)
with steps("requests", 3) as step:
    step()
print("done")
"""


def test_the_items_pass_through() -> None:
    assert list(track((1, 2, 3), "work")) == [1, 2, 3]
    with steps("work", 1) as step:
        step()


def test_nothing_is_shown_where_stderr_is_no_terminal() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout == "done\n"
    assert [line.split(maxsplit=1)[1] for line in done.stderr.splitlines()] == [
        "info test an event item=a",
        "info test an event item=b",
    ]


def test_a_terminal_shows_bars_between_whole_log_lines_and_stdout_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=theirs, text=True, timeout=60, check=True
    )
    os.close(theirs)
    seen = os.read(ours, 65536).decode()
    os.close(ours)

    assert done.stdout == "done\n"
    assert "loading weights" in seen
    assert "requests" in seen
    assert "event item=a" in seen.replace("\r\n", "\n")
    assert "\x1b[?25l" not in seen  # the cursor stays, for a process that is ended at once


@pytest.mark.parametrize(("every_s", "told"), [(0, ["1 of=2", "2 of=2"]), (60, [])])
def test_work_that_takes_longer_is_told_in_the_log_from_time_to_time(every_s: int, told: list[str]) -> None:
    program = f"""
import shell.progress
from shell.telemetry.logging import configure_logging
configure_logging("test")
shell.progress.LOG_EVERY_S = {every_s}
shell.progress.show_in_log()
list(shell.progress.track("ab", "loading weights"))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    lines = [line.split(maxsplit=1)[1] for line in done.stderr.splitlines()]
    assert lines == [f"info test loading weights done={each}" for each in told]
