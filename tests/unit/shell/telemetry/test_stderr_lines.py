from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from shell.telemetry import stderr_lines
from shell.telemetry.metric import Process
from shell.telemetry.metrics import Metrics
from shell.telemetry.stderr_lines import LineWriter

DEADLINE_S = 20.0

LOGS = """
import sys
from shell.telemetry.logging import configure_logging, get_logger
from shell.telemetry.stderr_lines import flush_lines, lines_dropped
configure_logging("router")
for number in range(int(sys.argv[1])):
    get_logger("test").info("event", number=number)
print(lines_dropped() if flush_lines(float(sys.argv[2])) else f"more than {lines_dropped()}", flush=True)
"""


class Stream:
    """Standard error as the test wants it: full, or one that nobody reads."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.full = False
        self.being_read = threading.Event()
        self.being_read.set()

    def write(self, line: str) -> None:
        assert self.being_read.wait(DEADLINE_S)
        if self.full:
            raise OSError("No space left on device")
        self.lines.append(line)


@pytest.fixture
def stream() -> Stream:
    return Stream()


def test_lines_are_written_whole_and_in_order(stream: Stream) -> None:
    writer = LineWriter(stream.write)
    for number in range(100):
        writer.put(f"line {number}")
    assert writer.flush(DEADLINE_S)
    assert stream.lines == [f"line {number}\n" for number in range(100)]
    assert writer.dropped == 0


def test_what_is_lost_on_a_full_disk_is_counted_and_told_once_it_has_room(
    stream: Stream, caplog: pytest.LogCaptureFixture
) -> None:
    writer = LineWriter(stream.write)
    stream.full = True
    for _ in range(3):
        writer.put("lost")
    assert writer.flush(DEADLINE_S)
    assert caplog.records == []
    stream.full = False
    for _ in range(2):
        writer.put("written")
        assert writer.flush(DEADLINE_S)
    assert writer.dropped == 3
    assert stream.lines[:2] == ["written\n"] * 2
    assert [(record.message, record.__dict__["fields"]) for record in caplog.records] == [
        ("log lines were lost", {"lines": 3})
    ]


def test_nobody_waits_for_a_reader_and_what_waits_is_bounded(stream: Stream) -> None:
    writer = LineWriter(stream.write, max_lines=10)
    stream.being_read.clear()
    for _ in range(50):
        writer.put("line")
    assert not writer.flush(timeout_s=0)
    assert writer.dropped in {39, 40}  # the thread may hold one line more
    stream.being_read.set()
    assert writer.flush(DEADLINE_S)
    assert stream.lines == ["line\n"] * (50 - writer.dropped)


def test_lost_lines_are_a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stderr_lines._stderr, "dropped", 7)
    assert b"\ntandem_log_lines_dropped_total 7.0\n" in Metrics(Process.ROUTER, "demo").exposition()[0]


def logs(num_lines: int, stderr: int, patience_s: float = DEADLINE_S) -> str:
    """What a process that logs so many lines says of its losses; it must end in order."""
    command = [sys.executable, "-c", LOGS, str(num_lines), str(patience_s)]
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=60, check=True
    ).stdout.strip()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_a_process_on_a_full_disk_goes_on() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    assert logs(5, full) == "5"
    os.close(full)


def test_a_process_whose_reader_has_gone_goes_on() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    assert logs(5, writer) == "5"
    os.close(writer)


def test_a_process_that_nobody_reads_goes_on_and_ends() -> None:
    reader, writer = os.pipe()
    lost = logs(60_000, writer, patience_s=0.5).removeprefix("more than ")
    assert int(lost) > 10_000
    os.close(reader)
    os.close(writer)
