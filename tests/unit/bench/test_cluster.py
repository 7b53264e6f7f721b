"""When a cluster is at rest."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from bench.support.cluster import becomes_idle
from tandem.types import WorkerLoad
from tests.registering import IDLE


def client_of(load: WorkerLoad) -> Any:
    worker = SimpleNamespace(load=load, heartbeat_age_s=-1.0)
    status = SimpleNamespace(active_requests=0, queued_requests=0, workers=[worker])
    return SimpleNamespace(status=lambda: status)


def test_blocks_that_only_a_cache_knows_are_held_by_nobody() -> None:
    pool = replace(IDLE.pool, free=5, cached=3)

    assert becomes_idle(client_of(replace(IDLE, pool=pool)), timeout_s=0.0)


@pytest.mark.parametrize("state", ["reserved", "receiving", "live", "quarantined"])
def test_a_block_in_any_other_state_is_held(state: str) -> None:
    pool = replace(IDLE.pool, free=7, **{state: 1})

    assert not becomes_idle(client_of(replace(IDLE, pool=pool)), timeout_s=0.0)
