"""How late the event loop is, measured by a loop whose time stands still."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from shell.telemetry import metric_names as names
from shell.telemetry.loop_lag import LoopLag
from shell.telemetry.metric import Process
from shell.telemetry.metrics import Metrics


class Timer:
    """What a loop gives for a call later."""

    def __init__(self, fire: Any) -> None:
        self.fire = fire
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class StillLoop:
    """Time and timers, moved by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, callback: Any, *args: Any) -> Timer:
        self.timers.append(Timer(lambda: callback(*args)))
        return self.timers[-1]


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> StillLoop:
    still = StillLoop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: cast("asyncio.AbstractEventLoop", still))
    return still


def test_a_timer_that_fires_late_tells_by_how_much_and_goes_on(loop: StillLoop) -> None:
    metrics = Metrics(Process.ROUTER, "demo")
    with LoopLag(metrics, period_s=0.25):
        loop.now_s += 0.25
        loop.timers[0].fire()
        loop.now_s += 0.65
        loop.timers[1].fire()
        cells = metrics.histogram(names.LOOP_LAG)
        assert dict(cells.cumulative((0.001, 0.2, 0.5)))[0.001] == 1
        assert cells.sum == pytest.approx(0.4)
        assert len(loop.timers) == 3


def test_nothing_fires_after_its_end(loop: StillLoop) -> None:
    with LoopLag(Metrics(Process.ROUTER, "demo")):
        pass
    assert [timer.cancelled for timer in loop.timers] == [True]
