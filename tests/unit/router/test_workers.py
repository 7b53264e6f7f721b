from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from router.placement import Demand, Obstacle
from router.prefix_map import Prefix
from router.tuning import IN_A_ROW
from router.workers import Workers
from tandem.errors import InvalidRequest, Reason, Unavailable
from tandem.types import Incarnation, Role, WorkerInfo
from tests.manual_clock import ManualClock

LEASE_S, STALL_S = 5.0, 30.0
"""As the `workers` fixture has them."""


def connect(workers: Workers, worker: WorkerInfo) -> None:
    """As its link does."""
    link = workers.link(worker)
    assert link is not None
    link.connected = True


def pass_time(workers: Workers, clock: ManualClock, seconds: float) -> None:
    """As it passes for a router that does not stand still."""
    for _ in range(round(seconds / workers.tick_s)):
        clock.advance_s(workers.tick_s)
        workers.tick()


def test_a_worker_is_usable_once_it_is_connected_and_has_sent_a_heartbeat(
    workers: Workers, info: Any, load: Any
) -> None:
    worker = info(Role.DECODE, "d")

    def obstacle() -> str | None:
        return workers.views()[0].obstacle

    workers.register(worker)
    assert obstacle() == "is not connected"
    connect(workers, worker)
    assert obstacle() == "has sent no heartbeat"
    workers.heartbeat(worker, load())
    assert obstacle() is None
    workers.heartbeat(worker, load(draining=True))
    assert obstacle() == "is draining"


def test_a_lease_ends_by_silence_and_begins_anew_with_a_heartbeat(
    workers: Workers, events: list[tuple[str, str]], clock: ManualClock, info: Any, load: Any
) -> None:
    worker = info(Role.DECODE, "d")
    workers.heartbeat(worker, load())
    pass_time(workers, clock, LEASE_S)
    assert len(workers.views()) == 1
    clock.advance_s(0.001)
    workers.tick()
    assert workers.views() == []
    workers.heartbeat(worker, load())
    assert [name for name, _ in events] == ["added", "lost", "added"]


def test_time_in_which_the_router_stood_still_is_nobodys_silence(
    workers: Workers, events: list[tuple[str, str]], clock: ManualClock, info: Any, load: Any
) -> None:
    workers.heartbeat(info(Role.DECODE, "d"), load(running_seqs=1))
    pass_time(workers, clock, 1)
    clock.advance_s(LEASE_S + STALL_S)
    workers.heartbeat(info(Role.DECODE, "e"), load(running_seqs=1))
    workers.tick()
    pass_time(workers, clock, LEASE_S - 2)
    assert [view.obstacle for view in workers.views()] == [Obstacle.NOT_CONNECTED] * 2
    pass_time(workers, clock, 1)
    assert [view.info.worker_id for view in workers.views()] == ["e"]
    pass_time(workers, clock, 2)
    assert not workers.views()


def test_a_worker_whose_name_another_process_used_is_back_once_that_one_is_gone(
    workers: Workers, events: list[tuple[str, str]], info: Any, load: Any
) -> None:
    mine = info(Role.DECODE, "d")
    other, third = (replace(mine, incarnation=Incarnation(f"d-life-{number}")) for number in (2, 3))
    workers.heartbeat(mine, load())
    workers.register(other)
    workers.register(third)
    for refused in (mine, other):
        with pytest.raises(Unavailable, match="newer incarnation of d is registered") as told:
            workers.heartbeat(refused, load())
        assert told.value.reason is Reason.WORKER_ID_TAKEN
    workers.deregister(mine)
    workers.deregister(third)
    workers.heartbeat(mine, load())
    assert [view.info for view in workers.views()] == [mine]
    assert [name for name, _ in events] == ["added", "lost"] * 3 + ["added"]


def test_a_worker_that_holds_no_sequence_is_refused(workers: Workers, info: Any) -> None:
    with pytest.raises(InvalidRequest, match="max_sequence_tokens"):
        workers.register(info(Role.DECODE, "d", max_sequence_tokens=0))


def test_an_engine_without_steps_is_stalled_only_if_it_has_work(
    workers: Workers, events: list[tuple[str, str]], clock: ManualClock, info: Any, load: Any
) -> None:
    worker = info(Role.DECODE, "d")

    def beat_for(seconds: float, **changes: Any) -> None:
        for _ in range(int(seconds)):
            pass_time(workers, clock, 1)
            workers.heartbeat(worker, load(**changes))

    workers.register(worker)
    connect(workers, worker)
    beat_for(100, running_seqs=0)
    beat_for(STALL_S, running_seqs=1)
    assert [name for name, _ in events] == ["added"]
    beat_for(2, running_seqs=1)
    assert workers.views()[0].obstacle == "is stalled"
    beat_for(1, running_seqs=1, engine_steps=1)
    assert [name for name, _ in events] == ["added", "lost", "added"]


def test_losing_a_stalled_worker_is_told_once(
    workers: Workers, events: list[tuple[str, str]], clock: ManualClock, info: Any, load: Any
) -> None:
    worker = info(Role.DECODE, "d")
    for _ in range(20):
        workers.heartbeat(worker, load(running_seqs=1))
        clock.advance_s(2)
    workers.deregister(worker)
    workers.deregister(worker)
    assert [name for name, _ in events] == ["added", "lost"]


async def test_assigned_tokens_count_until_the_next_heartbeat(workers: Workers, info: Any, load: Any) -> None:
    worker = info(Role.DECODE, "d", local_prefill_tokens=None)
    workers.heartbeat(worker, load(queued_prompt_tokens=5))
    connect(workers, worker)
    await workers.place(Demand(num_tokens=100, max_total_tokens=101), wait_s=1.0)
    assert workers.views()[0].queued_tokens == 105
    workers.heartbeat(worker, load(queued_prompt_tokens=70))
    assert workers.views()[0].queued_tokens == 70


async def test_sequences_that_ended_do_not_count_as_streams_until_the_next_heartbeat_tells(
    workers: Workers, info: Any, load: Any
) -> None:
    worker = info(Role.ELASTIC, "e")
    workers.heartbeat(worker, load())
    connect(workers, worker)
    placed = [await workers.place(Demand(num_tokens=10, max_total_tokens=20), wait_s=1.0) for _ in range(3)]
    workers.heartbeat(worker, load(running_seqs=12))
    for each in placed:
        workers.end(each, arrived=True)
    assert workers.views()[0].running_seqs == 9
    workers.heartbeat(worker, load(running_seqs=12))
    assert workers.views()[0].running_seqs == 12


async def test_a_prompt_that_another_worker_computes_is_not_in_line_where_it_decodes(
    workers: Workers, info: Any, load: Any
) -> None:
    pair = info(Role.PREFILL, "p"), info(Role.ELASTIC, "e")
    for worker in pair:
        workers.heartbeat(worker, load(queued_prompt_tokens=1000 * (worker.role is Role.ELASTIC)))
        connect(workers, worker)
    placed = await workers.place(Demand(num_tokens=100, max_total_tokens=101), wait_s=1.0)
    assert placed.placement.prefill == pair[0]
    assert {view.info.worker_id: view.queued_tokens for view in workers.views()} == {"p": 100, "e": 1000}
    assert {view.info.worker_id: view.assigned_tokens for view in workers.views()} == {"p": 100, "e": 100}


async def test_what_still_is_with_the_prefill_worker_counts_for_decode_beyond_its_heartbeats(
    workers: Workers, info: Any, load: Any
) -> None:
    pair = info(Role.PREFILL, "p"), info(Role.DECODE, "d")

    def heartbeats() -> None:
        for worker in pair:
            workers.heartbeat(worker, load())

    def assigned() -> list[tuple[int, int]]:
        return [(view.assigned_tokens, view.assigned_seqs) for view in workers.views()]

    heartbeats()
    for worker in pair:
        connect(workers, worker)
    demand = Demand(num_tokens=100, max_total_tokens=101, num_choices=2)
    first, second = [await workers.place(demand, wait_s=1.0) for _ in range(2)]
    assert assigned() == [(200, 4), (200, 4)]
    heartbeats()
    assert assigned() == [(0, 0), (200, 4)]
    workers.arrive(first)
    assert assigned() == [(0, 0), (200, 4)]
    heartbeats()
    assert assigned() == [(0, 0), (100, 2)]
    workers.end(first, arrived=True)
    workers.end(second, arrived=False)
    assert assigned() == [(0, 0), (0, 0)]


async def test_failures_are_remembered_until_the_worker_is_gone(workers: Workers, info: Any, load: Any) -> None:
    good, bad, other = info(Role.DECODE, "good"), info(Role.DECODE, "bad"), info(Role.PREFILL, "p")
    for worker in (good, bad, other):
        workers.heartbeat(worker, load())
        connect(workers, worker)
    for _ in range(IN_A_ROW):
        workers.failed(bad)
    assert [view.set_aside for view in workers.views()] == ["", "set aside for 1 s", ""]
    taken = [(await workers.place(Demand(10, 11), 0.0)).placement.decode for _ in range(20)]
    assert taken == [good] * 20
    workers.deregister(bad)
    for _ in range(IN_A_ROW):
        workers.failed(bad)
        workers.handoff_failed(other, bad)
    workers.heartbeat(bad, load())
    assert [view.set_aside for view in workers.views()] == [""] * 3
    assert workers.num_pairs_set_aside == 0


async def test_a_request_is_placed_while_a_worker_that_tells_of_its_cache_has_sent_no_heartbeat(
    workers: Workers, info: Any, load: Any
) -> None:
    late, early = info(Role.DECODE, "late"), info(Role.DECODE, "early", local_prefill_tokens=64)
    workers.register(late)
    workers.heartbeat(early, load())
    for worker in (late, early):
        connect(workers, worker)
        link = workers.link(worker)
        assert link is not None
        link.held.change([], [], cleared=True)
    demand = Demand(num_tokens=3, max_total_tokens=8, num_prompt_tokens=3, prefix=Prefix("", (1, 2, 3)))
    assignment = await workers.place(demand, wait_s=0)
    assert assignment.placement.decode == early
