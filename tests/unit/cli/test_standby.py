import subprocess
import sys
from collections.abc import Iterator

import pytest

from cli import standby, supervisor
from cli.standby import Standby


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Standby]:
    """Of processes that print what they were told."""
    monkeypatch.setattr(standby, "standby_command", lambda: [sys.executable, "-c", "print(input())"])
    standing_by = Standby()
    yield standing_by
    standing_by.close()


def test_it_becomes_one_child_and_the_next_one_is_made_when_asked_for(made: Standby) -> None:
    assert made.prepare()
    assert made.prepare()
    child = made.become(["python", "-m", "cli.launch", "--cores", "0", "decode_worker"])
    assert child is not None
    with child:
        assert child.stdout is not None
        assert child.stdout.read() == b'["--cores", "0", "decode_worker"]\n'
    assert made.become([]) is None
    assert made.prepare()


def test_one_that_ended_by_itself_is_told_and_serves_nobody(made: Standby, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "standby_command", lambda: [sys.executable, "-c", ""])
    opened: list[subprocess.Popen[bytes]] = []

    def open_process(command: list[str], stdin: int) -> subprocess.Popen[bytes]:
        opened.append(supervisor.open_process(command, stdin))
        return opened[-1]

    monkeypatch.setattr(standby, "open_process", open_process)
    made.prepare()
    opened[0].wait(20)
    assert not made.prepare()
    assert made.become(["python", "-m", "cli.launch", "decode_worker"]) is None
