"""A process that has hardly any descriptor left says so."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest

from shell.rpc.open_files import OpenFiles
from tests.manual_clock import ManualClock


@pytest.fixture
def limited() -> Iterator[int]:
    """The soft limit of open files is what is open; returned is this limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    yield lowest
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_with_no_descriptor_left_it_warns_once_a_minute_with_the_limit_and_the_remedy(
    limited: int, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    open_files = OpenFiles(clock)
    for seconds in (0.0, 59.0, 1.0):
        clock.advance_s(seconds)
        open_files.look()
    assert [record.fields for record in caplog.records] == [{"limit": limited}] * 2  # type: ignore[attr-defined]
    assert "ulimit -n" in caplog.records[0].message


def test_with_descriptors_left_it_is_quiet(caplog: pytest.LogCaptureFixture) -> None:
    OpenFiles(ManualClock()).look()
    assert caplog.records == []
