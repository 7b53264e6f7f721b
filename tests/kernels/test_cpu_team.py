"""The native kernels' team of threads: same results with any number, and no thread outlives its owner."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from kernels.cpu.library import Library
from kernels.cpu.row_max import RowMax

pytestmark = pytest.mark.native

MANY_THREADS = 48
"""More than any machine of ours has cores, so that some are always starved."""


@pytest.fixture(autouse=True)
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _rows() -> torch.Tensor:
    return torch.randn(1000, 600, generator=torch.Generator().manual_seed(0))


def _members() -> set[str]:
    """Threads of this process that belong to a team without owning it."""
    found = set()
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has ended meanwhile
            if path.read_text() == "tandem-team\n":
                found.add(path.parent.name)
    return found


def _wait_for_members(count: int, before: set[str]) -> None:
    """Besides those `before`. One has its name a little after it has begun to work, and is gone a little late, too."""
    deadline_s = time.monotonic() + 30
    while len(_members() - before) != count:
        assert time.monotonic() < deadline_s, f"{_members() - before} instead of {count} members"
        time.sleep(0.001)


def _on_a_thread(body: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as executor:
        executor.submit(body).result()


@pytest.mark.parametrize("num_threads", [1, 2, 3, MANY_THREADS])
def test_any_number_of_threads_finishes_every_unit(num_threads):
    row_max, rows = RowMax(Library()), _rows()
    torch.set_num_threads(1)
    expected = rows.argmax(1).tolist()
    torch.set_num_threads(num_threads)
    for _ in range(100):
        assert row_max(rows).tolist() == expected


def test_a_team_follows_the_number_of_threads_that_is_set():
    row_max = RowMax(Library())

    def body() -> None:
        before = _members()
        for num_threads in (4, 2, 7):
            torch.set_num_threads(num_threads)
            row_max(_rows())
            _wait_for_members(num_threads - 1, before)

    _on_a_thread(body)


def test_a_team_ends_with_the_thread_that_it_works_for():
    row_max, before = RowMax(Library()), _members()
    for _ in range(3):

        def body() -> None:
            torch.set_num_threads(6)
            row_max(_rows())
            _wait_for_members(5, before)

        _on_a_thread(body)
        _wait_for_members(0, before)


def test_two_threads_have_teams_of_their_own():
    row_max, rows = RowMax(Library()), _rows()
    expected = rows.argmax(1).tolist()

    def body() -> None:
        torch.set_num_threads(3)
        for _ in range(100):
            assert row_max(rows).tolist() == expected

    with ThreadPoolExecutor(2) as executor:
        for future in [executor.submit(body) for _ in range(2)]:
            future.result()


def test_a_child_of_fork_opens_a_team_of_its_own():
    torch.set_num_threads(3)
    row_max, rows = RowMax(Library()), _rows()
    expected = row_max(rows).tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads: that is the point
        child = os.fork()
    if child == 0:
        os._exit(int(row_max(rows).tolist() != expected))
    assert os.waitpid(child, 0)[1] == 0
