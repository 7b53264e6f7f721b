from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from router.placement import Obstacle
from router.registry import Registry
from tandem.errors import HandshakeMismatch, InvalidRequest, Unavailable
from tandem.types import Incarnation, Role, WorkerId, WorkerInfo
from tests.manual_clock import ManualClock

LEASE_S, STALL_S = 5.0, 30.0


class Events:
    """A WorkerListener that remembers."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def worker_added(self, info: WorkerInfo) -> None:
        self.seen.append(("added", info.incarnation))

    def worker_lost(self, info: WorkerInfo, why: str) -> None:
        self.seen.append(("lost", info.incarnation))

    def worker_changed(self, info: WorkerInfo) -> None:
        """Not looked at here."""


@pytest.fixture
def registry(clock: ManualClock) -> Registry:
    return Registry("tiny", "config", clock, LEASE_S, STALL_S)


@pytest.fixture
def events(registry: Registry) -> Events:
    events = Events()
    registry.subscribe(events)
    return events


def pass_time(registry: Registry, clock: ManualClock, seconds: float) -> None:
    """As it passes for a router that does not stand still."""
    for _ in range(round(seconds / registry.tick_s)):
        clock.advance_s(registry.tick_s)
        registry.tick()


def test_a_worker_is_usable_once_it_is_connected_and_has_sent_a_heartbeat(
    registry: Registry, info: Any, load: Any
) -> None:
    worker = info(Role.DECODE, "d")

    def obstacle() -> str | None:
        return registry.views()[0].obstacle

    registry.register(worker)
    assert obstacle() == "is not connected"
    registry.set_connected(worker, connected=True)
    assert obstacle() == "has sent no heartbeat"
    registry.heartbeat(worker, load())
    assert obstacle() is None
    registry.heartbeat(worker, load(draining=True))
    assert obstacle() == "is draining"


def test_a_lease_ends_by_silence_and_begins_anew_with_a_heartbeat(
    registry: Registry, events: Events, clock: ManualClock, info: Any, load: Any
) -> None:
    worker = info(Role.DECODE, "d")
    registry.heartbeat(worker, load())
    pass_time(registry, clock, LEASE_S)
    assert len(registry.views()) == 1
    clock.advance_s(0.001)
    registry.tick()
    assert registry.views() == []
    registry.heartbeat(worker, load())
    assert [name for name, _ in events.seen] == ["added", "lost", "added"]


def test_time_in_which_the_router_stood_still_is_nobodys_silence(
    registry: Registry, events: Events, clock: ManualClock, info: Any, load: Any
) -> None:
    registry.heartbeat(info(Role.DECODE, "d"), load(running_seqs=1))
    pass_time(registry, clock, 1)
    clock.advance_s(LEASE_S + STALL_S)
    registry.heartbeat(info(Role.DECODE, "e"), load(running_seqs=1))
    registry.tick()
    pass_time(registry, clock, LEASE_S - 2)
    assert [view.obstacle for view in registry.views()] == [Obstacle.NOT_CONNECTED] * 2
    pass_time(registry, clock, 1)
    assert [view.info.worker_id for view in registry.views()] == ["e"]
    pass_time(registry, clock, 2)
    assert not registry.views()


def test_a_new_incarnation_replaces_the_old_at_once_and_for_good(
    registry: Registry, events: Events, info: Any, load: Any
) -> None:
    old = info(Role.DECODE, "d")
    new = replace(old, incarnation=Incarnation("d-life-2"))
    registry.register(old)
    registry.register(new)
    assert events.seen == [("added", "d-life-1"), ("lost", "d-life-1"), ("added", "d-life-2")]
    with pytest.raises(Unavailable, match="newer incarnation"):
        registry.heartbeat(old, load())
    registry.deregister(old)
    assert [view.info for view in registry.views()] == [new]


@pytest.mark.parametrize("field", ["model", "config_fingerprint"])
def test_another_model_is_refused_by_field(registry: Registry, events: Events, info: Any, field: str) -> None:
    with pytest.raises(HandshakeMismatch, match=field):
        registry.register(info(Role.DECODE, "d", **{field: "other"}))
    assert not events.seen


def test_a_worker_that_holds_no_sequence_is_refused(registry: Registry, info: Any) -> None:
    with pytest.raises(InvalidRequest, match="max_sequence_tokens"):
        registry.register(info(Role.DECODE, "d", max_sequence_tokens=0))


def test_an_engine_without_steps_is_stalled_only_if_it_has_work(
    registry: Registry, events: Events, clock: ManualClock, info: Any, load: Any
) -> None:
    worker = info(Role.DECODE, "d")

    def beat_for(seconds: float, **changes: Any) -> None:
        for _ in range(int(seconds)):
            pass_time(registry, clock, 1)
            registry.heartbeat(worker, load(**changes))

    registry.set_connected(worker, connected=True)
    beat_for(100, running_seqs=0)
    beat_for(STALL_S, running_seqs=1)
    assert [name for name, _ in events.seen] == ["added"]
    beat_for(2, running_seqs=1)
    assert registry.views()[0].obstacle == "is stalled"
    beat_for(1, running_seqs=1, engine_steps=1)
    assert [name for name, _ in events.seen] == ["added", "lost", "added"]


def test_losing_a_stalled_worker_is_told_once(
    registry: Registry, events: Events, clock: ManualClock, info: Any, load: Any
) -> None:
    worker = info(Role.DECODE, "d")
    for _ in range(20):
        registry.heartbeat(worker, load(running_seqs=1))
        clock.advance_s(2)
    registry.deregister(worker)
    registry.deregister(worker)
    assert [name for name, _ in events.seen] == ["added", "lost"]


def test_assigned_tokens_count_until_the_next_heartbeat(registry: Registry, info: Any, load: Any) -> None:
    worker = info(Role.PREFILL, "p")
    registry.heartbeat(worker, load(queued_prompt_tokens=5))
    registry.assign(worker, 100)
    assert registry.views()[0].queued_tokens == 105
    registry.heartbeat(worker, load(queued_prompt_tokens=70))
    assert registry.views()[0].queued_tokens == 70


def test_an_order_to_drain_needs_a_known_worker(registry: Registry, info: Any) -> None:
    with pytest.raises(InvalidRequest, match="worker_id"):
        registry.order_drain(WorkerId("d"))
    worker = info(Role.DECODE, "d")
    registry.register(worker)
    assert not registry.drain_ordered(worker)
    assert registry.order_drain(WorkerId("d")) == worker
    assert registry.drain_ordered(worker)
