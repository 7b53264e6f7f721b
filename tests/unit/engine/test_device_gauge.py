"""How much of a GPU's memory is taken."""

from __future__ import annotations

import pytest
import torch

from engine.device_gauge import DeviceGauge
from tests.manual_clock import ManualClock


def test_cuda_is_asked_every_few_seconds_and_not_at_each_look(monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter((70, 40))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (next(free), 100))
    clock = ManualClock()
    gauge = DeviceGauge(torch.device("cuda", 0), clock)
    assert [gauge(), gauge()] == [(30, 100), (30, 100)]
    clock.advance_s(60)
    assert gauge() == (60, 100)


def test_a_cpu_has_none() -> None:
    assert DeviceGauge(torch.device("cpu"), ManualClock())() == (0, 0)
