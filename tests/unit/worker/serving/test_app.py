"""What every worker process sets before its role's own parts."""

from __future__ import annotations

import sys

import pytest

import worker.serving.app
from shell.config import PrefillConfig
from tandem.types import Role
from worker.serving.app import SWITCH_INTERVAL_S, run_worker


async def _never(*_: object) -> None:
    raise AssertionError("no process is to run")


def test_a_worker_process_lets_its_event_loop_run_within_the_switch_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    before_s, seen_s = sys.getswitchinterval(), []
    monkeypatch.setattr(worker.serving.app, "run_process", lambda _: seen_s.append(sys.getswitchinterval()) or 0)
    monkeypatch.setattr(worker.serving.app, "configure_logging", lambda *_: None)
    try:
        assert run_worker(Role.PREFILL, PrefillConfig(), _never) == 0
    finally:
        sys.setswitchinterval(before_s)
    assert seen_s == [pytest.approx(SWITCH_INTERVAL_S)]
