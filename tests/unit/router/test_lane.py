from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from router.lane import Lane


@pytest.fixture
def lane() -> Iterator[Lane]:
    lane = Lane("test")
    yield lane
    lane.close()


def noting(done: list[int], size: int) -> Callable[[], None]:
    return lambda: done.append(size)


async def test_small_work_goes_first_and_the_oldest_every_fourth_time(lane: Lane) -> None:
    may_go_on = threading.Event()
    done: list[int] = []
    first = asyncio.create_task(lane.run(0, may_go_on.wait))
    await asyncio.sleep(0)
    sizes = [90, 80, *range(1, 9)]
    waiting = [asyncio.create_task(lane.run(size, noting(done, size))) for size in sizes]
    await asyncio.sleep(0)

    may_go_on.set()
    await asyncio.gather(first, *waiting)

    assert done == [1, 2, 3, 90, 4, 5, 6, 80, 7, 8]


async def test_a_turn_that_comes_to_one_who_leaves_is_passed_on(lane: Lane) -> None:
    may_go_on = threading.Event()
    done: list[int] = []
    first = asyncio.create_task(lane.run(0, may_go_on.wait))
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(lane.run(size, noting(done, size))) for size in (1, 2, 3)]
    await asyncio.sleep(0)
    waiting[1].cancel()
    may_go_on.set()
    await first
    waiting[0].cancel()  # its turn has come, or it is under way

    async with asyncio.timeout(20):
        await waiting[2]
        await lane.run(4, noting(done, 4))
    assert done[-2:] == [3, 4]
    assert lane.size == 0


async def test_work_that_its_caller_left_keeps_the_thread_and_counts_until_it_is_done(lane: Lane) -> None:
    may_go_on = threading.Event()
    done: list[int] = []
    left = asyncio.create_task(lane.run(7, may_go_on.wait))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait({left})
    waiting = [asyncio.create_task(lane.run(size, noting(done, size))) for size in (9, 2)]
    await asyncio.sleep(0.05)
    assert lane.size == 7 + 9 + 2

    may_go_on.set()
    await asyncio.gather(*waiting)
    assert done == [2, 9]
    assert lane.size == 0


async def test_what_work_raises_comes_out_and_the_next_goes_on(lane: Lane) -> None:
    with pytest.raises(ZeroDivisionError):
        await lane.run(1, lambda: 1 // 0)

    assert await lane.run(1, lambda: 5) == 5
