"""Two steps in flight: what runs ahead, what waits, and that no token is wrong, lost or told twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from engine.block_pool import BlockPool
from engine.engine_thread import EngineBroken
from tandem.errors import InternalError
from tandem.types import BlockId, GroupSpec, Handle, TokenId
from tests.decode_rows import feeds_of
from worker.releases import BlockReleases

MakeSpec = Callable[..., GroupSpec]
Completion = Callable[..., list[TokenId]]


def feeds(bench: Any, step: int) -> list[int | None]:
    return [None if feed < 0 else feed for feed in feeds_of(bench.engine.steps[step])]


async def decoding(bench: Any, *specs: GroupSpec) -> list[Handle]:
    """Hands them all over; their first step is in flight, and the engine held."""
    bench.engine.hold()
    handles = [bench.reserve(number, spec) for number, spec in enumerate(specs, start=1)]
    tickets = [await bench.ticket(handle) for handle in handles]
    for ticket, spec in zip(tickets, specs, strict=True):
        bench.hand_off(ticket, spec)
    await bench.engine.until_launched(1)
    return handles


async def two_in_flight(bench: Any) -> None:
    """A first step shows how long steps take; the next two are launched at once."""
    bench.engine.allow()
    await bench.engine.until_launched(3)
    assert bench.engine.num_in_flight == 2


async def nothing_more_happens(bench: Any) -> None:
    num_steps = len(bench.engine.steps)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(bench.engine.steps) == num_steps


async def test_a_decode_step_is_launched_behind_the_running_one_and_fed_by_it(
    open_bench: Any, make_spec: MakeSpec, completion: Completion
) -> None:
    async with open_bench() as bench:
        first, second = await decoding(bench, make_spec(5, 9), make_spec(6, 9, salt=1))
        await two_in_flight(bench)
        assert (feeds(bench, 1), feeds(bench, 2)) == ([None, None], [0, 1])
        bench.engine.let_go()
        await bench.router.until(lambda: {first, second} == set(bench.router.ended))
        assert bench.router.tokens[second] == completion(make_spec(6, 9, salt=1))[1:]


async def test_with_overlap_off_one_step_is_in_flight(open_bench: Any, make_spec: MakeSpec) -> None:
    async with open_bench(overlap_steps=False) as bench:
        handle = bench.reserve(1, make_spec(5, 9), local_prefill=True)
        await bench.router.until(lambda: handle in bench.router.ended)
        assert bench.engine.max_in_flight == 1


async def test_no_step_is_launched_behind_one_that_is_expected_to_run_for_long(
    open_bench: Any, make_spec: MakeSpec
) -> None:
    async with open_bench() as bench:
        bench.engine.step_s = 1000.0
        handle = bench.reserve(1, make_spec(5, 9), local_prefill=True)
        await bench.router.until(lambda: handle in bench.router.ended)
        assert bench.engine.max_in_flight == 1, "a step that ends sooner than expected is no reason to wait"


async def test_an_arrival_joins_a_step_that_is_launched_behind(
    open_bench: Any, make_spec: MakeSpec, completion: Completion
) -> None:
    async with open_bench() as bench:
        (old,) = await decoding(bench, make_spec(5, 9))
        await two_in_flight(bench)
        spec = make_spec(6, 5, n=2, salt=1)
        new = bench.reserve(2, spec)
        first = bench.hand_off(await bench.ticket(new), spec)
        bench.engine.allow()
        await bench.engine.until_launched(4)
        assert feeds(bench, 3) == [0, None, None]
        assert len(bench.engine.steps[3].copies) == 1
        bench.engine.let_go()
        await bench.router.until(lambda: {old, new} == set(bench.router.ended))
        for index in (0, 1):
            assert [first[index], *bench.router.choices[new, index]] == completion(spec, index)


async def test_a_prompt_to_compute_waits_for_the_running_steps_end(open_bench: Any, make_spec: MakeSpec) -> None:
    async with open_bench() as bench:
        (old,) = await decoding(bench, make_spec(5, 20))
        await two_in_flight(bench)
        new = bench.reserve(2, make_spec(9, 2, salt=1), local_prefill=True)
        await bench.ticket(new)
        bench.engine.allow()
        await bench.router.until(lambda: len(bench.router.tokens[old]) == 2)
        await nothing_more_happens(bench)
        bench.engine.let_go()
        await bench.router.until(lambda: {old, new} == set(bench.router.ended))
        assert feeds(bench, 3) == [None, None]


async def test_an_end_token_costs_one_discarded_token(
    open_bench: Any, make_spec: MakeSpec, completion: Completion
) -> None:
    async with open_bench() as bench:
        fourth = completion(make_spec(5, 20))[3]
        short, long = make_spec(5, 20, end=frozenset({fourth})), make_spec(6, 20, salt=1)
        ending, going = await decoding(bench, short, long)
        bench.engine.let_go()
        await bench.router.until(lambda: {ending, going} == set(bench.router.ended))
        assert bench.router.tokens[ending] == completion(short)[1:]
        assert bench.router.tokens[going] == completion(long)[1:]
        assert [len(feeds_of(step)) for step in bench.engine.steps[:6]] == [2, 2, 2, 2, 1, 1]
    assert bench.recorded.sequences[0].args("SequenceEnded") == (None, 3)


async def test_a_sequence_at_its_last_token_is_not_computed_further(open_bench: Any, make_spec: MakeSpec) -> None:
    async with open_bench() as bench:
        handle = bench.reserve(1, make_spec(5, 6), local_prefill=True)
        await bench.router.until(lambda: handle in bench.router.ended)
        assert len(bench.engine.steps) == 6


@pytest.mark.parametrize("how", ["release", "deadline", "broken logits"])
async def test_what_ends_while_two_steps_are_in_flight_holds_its_blocks_until_both_have_ended(
    open_bench: Any, make_spec: MakeSpec, completion: Completion, how: str
) -> None:
    async with open_bench() as bench:
        going, ending = await decoding(bench, make_spec(5, 20, salt=1), make_spec(9, 20, n=2, timeout_s=5.0))
        await two_in_flight(bench)
        if how == "release":
            bench.worker.release(bench.router, ending)
        elif how == "deadline":
            bench.clock.advance_s(6.0)
            bench.worker.tick()
        else:
            bench.engine.breaks = (1, 2)
            bench.engine.allow()
            await bench.router.until(lambda: ending in bench.router.errors)
        held = bench.pool.counts().live
        assert held >= 6
        bench.engine.let_go()
        await bench.router.until(lambda: going in bench.router.ended)
        assert bench.router.tokens[going] == completion(make_spec(5, 20, salt=1))[1:]
        assert ending not in bench.router.ended


@pytest.mark.parametrize("failing", [1, 2])
async def test_a_step_that_breaks_fails_every_request_of_it_and_of_the_one_it_feeds_once(
    open_bench: Any, make_spec: MakeSpec, completion: Completion, failing: int
) -> None:
    async with open_bench() as bench:
        bench.engine.errors[failing] = ZeroDivisionError()
        handles = await decoding(bench, make_spec(5, 20), make_spec(6, 20, n=2, salt=1))
        bench.engine.let_go()
        await bench.router.until(lambda: set(handles) == set(bench.router.errors))
        assert all(isinstance(error, InternalError) for error in bench.router.errors.values())
        handle = bench.reserve(9, make_spec(5, 7), local_prefill=True)
        await bench.router.until(lambda: handle in bench.router.ended)
        assert bench.router.tokens[handle] == completion(make_spec(5, 7))


async def test_a_step_that_is_not_fed_by_a_broken_one_is_not_lost(
    open_bench: Any, make_spec: MakeSpec, completion: Completion
) -> None:
    async with open_bench() as bench:
        bench.engine.errors[2] = ZeroDivisionError()
        spec = make_spec(6, 20, salt=1)
        (ending,) = await decoding(bench, make_spec(5, 4))
        await two_in_flight(bench)
        going = bench.reserve(2, spec)
        bench.hand_off(await bench.ticket(going), spec)
        bench.engine.allow()
        await bench.engine.until_launched(4)
        assert feeds(bench, 3) == [None], "the other one's last token is pending"
        bench.engine.let_go()
        await bench.router.until(lambda: going in bench.router.ended)
        assert bench.router.tokens[going] == completion(spec)[1:]
        assert list(bench.router.errors) == [ending]


async def test_a_broken_engine_is_left_only_when_both_steps_have_ended(open_bench: Any, make_spec: MakeSpec) -> None:
    async with open_bench() as bench:
        await decoding(bench, make_spec(5, 20))
        await two_in_flight(bench)
        bench.engine.errors[1] = EngineBroken("8 steps in a row failed")
        bench.engine.let_go()
        with pytest.raises(EngineBroken):
            await bench.running
        assert bench.engine.num_in_flight == 0


async def test_a_cancelled_loop_ends_when_both_steps_have(open_bench: Any, make_spec: MakeSpec) -> None:
    async with open_bench() as bench:
        (handle,) = await decoding(bench, make_spec(5, 20))
        await two_in_flight(bench)
        bench.running.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not bench.running.done()
        bench.engine.let_go()
        await asyncio.wait({bench.running})
        assert bench.engine.num_in_flight == 0
        bench.worker.release(bench.router, handle)


async def test_a_seat_that_is_about_to_be_free_is_waited_for(open_bench: Any, make_spec: MakeSpec) -> None:
    async with open_bench(max_seqs=2) as bench:
        specs = make_spec(5, 4), make_spec(5, 9, salt=1), make_spec(6, 9, salt=2)
        ending, going, waiting = await decoding(bench, *specs)
        await two_in_flight(bench)
        bench.engine.allow()
        await bench.router.until(lambda: len(bench.router.tokens[going]) == 2)
        await nothing_more_happens(bench)
        bench.engine.allow()
        await bench.engine.until_launched(4)
        assert ending in bench.router.ended
        assert feeds(bench, 3) == [None, None], "planned when the seat was free"
        bench.engine.let_go()
        await bench.router.until(lambda: waiting in bench.router.ended)


async def test_a_plan_that_needs_preemption_waits_for_the_running_step(
    open_bench: Any, make_spec: MakeSpec, completion: Completion
) -> None:
    async with open_bench(num_blocks=6, block_size=4, max_seqs=2) as bench:
        specs = {Handle(1): make_spec(7, 13), Handle(2): make_spec(7, 13, salt=1)}
        for handle, spec in specs.items():
            bench.reserve(handle, spec, local_prefill=True)
        await bench.router.until(lambda: set(specs) == set(bench.router.ended))
        assert bench.worker.load().preemptions > 0
        assert {handle: completion(spec) for handle, spec in specs.items()} == bench.router.tokens
        assert bench.engine.max_in_flight == 2


# --- the parts ---


def test_blocks_are_free_at_once_without_a_step_and_else_after_the_newest_one() -> None:
    pool = BlockPool(8, 4)
    releases = BlockReleases(pool)
    releases.release([pool.allocate(1)])
    assert pool.num_free == 8
    releases.step_launched()
    releases.release([pool.allocate(2)])
    releases.step_launched()
    releases.release([pool.allocate(3), pool.allocate(1)])
    assert pool.num_free == 2
    releases.step_ended()
    assert pool.num_free == 4
    releases.step_ended()
    assert pool.num_free == 8
    assert releases.num_in_flight == 0


def test_a_shared_block_given_up_twice_is_free_with_its_last_holder() -> None:
    pool = BlockPool(8, 4)
    releases = BlockReleases(pool)
    blocks: tuple[BlockId, ...] = pool.allocate(2)
    pool.retain(blocks)
    releases.step_launched()
    releases.release([blocks])
    releases.step_launched()
    releases.release([blocks])
    releases.step_ended()
    assert pool.num_free == 6
    releases.step_ended()
    assert pool.num_free == 8
