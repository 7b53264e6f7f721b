from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission import Admission, AdmissionQueue, Entry
from shell.clock import Deadline
from tandem.errors import Overloaded
from tests.manual_clock import ManualClock


def queue(max_active: int = 1, max_queued: int = 4, max_queued_tokens: int = 100) -> AdmissionQueue:
    return AdmissionQueue(max_active, max_queued, max_queued_tokens)


def test_priority_goes_first_and_arrival_decides_among_equals() -> None:
    waiting = queue()
    waiting.enter(Entry(1), None)
    entries = [Entry(1, priority) for priority in (0, 5, 0, 5)]
    assert not any(waiting.enter(entry, None) for entry in entries)
    order = [waiting.depart(1.0) for _ in range(5)]
    assert order == [entries[1], entries[3], entries[0], entries[2], None]
    assert waiting.num_active == 0


def test_requests_about_to_enter_count_as_if_they_had() -> None:
    waiting = queue(max_active=2, max_queued=1)
    waiting.enter(Entry(1), None)
    waiting.check_room(0, num_coming=1)
    with pytest.raises(Overloaded, match="2 requests"):
        waiting.check_room(0, num_coming=2)


def test_too_many_tokens_are_shed_but_one_large_prompt_may_wait_alone() -> None:
    waiting = queue(max_queued_tokens=100)
    waiting.enter(Entry(1), None)
    assert not waiting.enter(Entry(500), None)
    with pytest.raises(Overloaded):
        waiting.enter(Entry(1), None)


def test_who_would_outwait_its_deadline_is_shed_at_once_and_told_when_to_come_back() -> None:
    waiting = queue()
    waiting.enter(Entry(1), None)
    waiting.enter(Entry(1), None)
    waiting.enter(Entry(1), None)
    waiting.depart(10.0)
    waiting.depart(14.0)  # served in 4 s each, now and then
    with pytest.raises(Overloaded) as caught:
        waiting.enter(Entry(1), 3.9)
    assert caught.value.retry_after_s == pytest.approx(4.0)
    assert not waiting.enter(Entry(1), 4.1)


def test_a_slow_spell_is_forgotten_once_a_place_is_free() -> None:
    waiting = queue()
    for _ in range(3):
        waiting.enter(Entry(1), None)
    for now_s in (100.0, 200.0, 300.0):
        waiting.depart(now_s)
    waiting.enter(Entry(1), 1.0)
    assert not waiting.enter(Entry(1), 1.0)


@given(st.lists(st.tuples(st.sampled_from(["enter", "depart", "withdraw"]), st.integers(0, 3)), max_size=60))
def test_counts_and_bounds_hold_whatever_happens(steps: list[tuple[str, int]]) -> None:
    waiting, queued, active, now_s = queue(max_active=2), [], 0, 0.0
    for action, number in steps:
        now_s += 1
        if action == "enter":
            entry = Entry(number, priority=number)
            try:
                if waiting.enter(entry, None):
                    active += 1
                else:
                    queued.append(entry)
            except Overloaded:
                assert len(queued) == 4
        elif action == "depart" and active:
            successor = waiting.depart(now_s)
            if successor is None:
                active -= 1
            else:
                queued.remove(successor)
        elif action == "withdraw" and queued:
            assert waiting.withdraw(queued.pop(number % len(queued)))
        assert (waiting.num_active, waiting.num_queued) == (active, len(queued))
        assert waiting.queued_tokens == sum(entry.num_tokens for entry in queued)
        assert active <= 2
        assert not queued or active == 2


async def test_a_place_given_to_a_waiter_that_is_cancelled_goes_to_the_next(clock: ManualClock) -> None:
    waiting = queue()
    admission = Admission(waiting, clock)
    order: list[str] = []

    async def hold(name: str, gate: asyncio.Event) -> None:
        async with admission.slot(1, 0, Deadline(clock, None)):
            order.append(name)
            await gate.wait()

    gates = [asyncio.Event() for _ in range(3)]
    tasks = [asyncio.create_task(hold(name, gate)) for name, gate in zip("abc", gates, strict=True)]
    await _until(lambda: waiting.num_queued == 2)
    gates[0].set()
    await _until(lambda: waiting.num_queued == 1)  # b has its turn, and may not have run yet
    tasks[1].cancel()
    gates[2].set()
    await tasks[2]
    assert order[0] == "a"
    assert order[-1] == "c"
    assert waiting.num_active == waiting.num_queued == 0


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


def test_when_more_may_run_those_that_wait_begin() -> None:
    waiting = queue(max_active=1)
    entries = [Entry(1) for _ in range(4)]
    assert [waiting.enter(each, None) for each in entries] == [True, False, False, False]
    waiting.max_active = 3
    assert [waiting.next() for _ in range(3)] == [*entries[1:3], None]
    assert (waiting.num_active, waiting.num_queued) == (3, 1)


def test_when_fewer_may_run_nobody_follows_who_departs() -> None:
    waiting = queue(max_active=2)
    entries = [Entry(1) for _ in range(3)]
    for each in entries:
        waiting.enter(each, None)
    waiting.max_active = 1
    assert waiting.depart(1.0) is None
    assert waiting.depart(2.0) is entries[2]
    assert waiting.num_active == 1
