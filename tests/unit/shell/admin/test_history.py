"""The ring of samples that a page opens with."""

from __future__ import annotations

import asyncio

from shell.admin.history import NUM_SAMPLES, History


async def test_samples_are_there_before_anybody_asks_and_a_figure_that_was_missing_is_a_gap() -> None:
    figures = iter([{"active": 1.0}, {"active": 2.0, "used/w": 3.0}, {"used/w": 4.0}])
    done = asyncio.Event()

    def read() -> dict[str, float]:
        found = next(figures, None)
        if found is None:
            done.set()
        return found or {}

    history = History(read, period_s=0.001)
    with history:
        await done.wait()
        told = history.report()
    assert isinstance(told, dict)
    assert told["period_s"] == 0.001
    assert told["series"]["active"][:3] == [1.0, 2.0, None]
    assert told["series"]["used/w"][:3] == [None, 3.0, 4.0]


async def test_the_oldest_samples_go() -> None:
    count = 0
    done = asyncio.Event()

    def read() -> dict[str, float]:
        nonlocal count
        count += 1
        if count > NUM_SAMPLES + 5:
            done.set()
        return {"count": float(count)}

    history = History(read, period_s=0.0)
    with history:
        await done.wait()
        told = history.report()
    assert isinstance(told, dict)
    assert len(told["series"]["count"]) == told["most"] == NUM_SAMPLES
    assert told["series"]["count"][-1] == float(count)
