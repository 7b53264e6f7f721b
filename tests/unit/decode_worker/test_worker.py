"""The whole worker on fakes: hand-offs, local prompts, preemption, every way to end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from decode_worker import reservations
from decode_worker.incoming_transfers import HANDOFF_S
from engine.engine_thread import EngineBroken
from tandem.errors import (
    DeadlineExceeded,
    FrameError,
    InternalError,
    InvalidRequest,
    Overloaded,
    Reason,
    TicketRefused,
    TransferError,
    Unavailable,
)
from tandem.first_tokens import encode_first_tokens
from tandem.types import FinishReason, GroupSpec, Handle, TokenId

MakeSpec = Callable[..., GroupSpec]
Completion = Callable[..., list[TokenId]]


async def test_a_handed_off_sequence_streams_everything_after_the_first_token(
    open_bench: Any, make_spec: MakeSpec, completion: Completion
) -> None:
    async with open_bench() as bench:
        spec = make_spec(9, 7)
        handle = bench.reserve(1, spec)
        ticket = await bench.ticket(handle)
        assert bench.pool.counts().reserved == 3
        first = bench.hand_off(ticket, spec)
        await bench.router.until(lambda: handle in bench.router.ended)
        assert [first[0], *bench.router.tokens[handle]] == completion(spec)
        assert handle not in bench.router.cached_tokens


async def test_a_local_prompt_is_announced_before_its_first_token(
    open_bench: Any, make_spec: MakeSpec, completion: Completion
) -> None:
    async with open_bench(chunk_tokens=4) as bench:
        spec = make_spec(13, 5)
        handle = bench.reserve(1, spec, local_prefill=True)
        assert await bench.ticket(handle) == ""
        await bench.router.until(lambda: handle in bench.router.ended)
        assert handle in bench.router.cached_tokens
        assert bench.router.tokens[handle] == completion(spec)


async def test_a_resumed_sequence_goes_on_at_its_next_token(
    open_bench: Any, make_spec: MakeSpec, completion: Completion
) -> None:
    async with open_bench() as bench:
        spec = make_spec(9, 7, emitted=3)
        by_handoff, by_itself = bench.reserve(1, spec), bench.reserve(2, spec, local_prefill=True)
        bench.hand_off(await bench.ticket(by_handoff), spec)
        await bench.router.until(lambda: {by_handoff, by_itself} <= set(bench.router.ended))
        assert bench.router.first_offsets[by_itself, 0] == 3
        assert bench.router.tokens[by_itself] == completion(spec)[3:]
        assert bench.router.tokens[by_handoff] == completion(spec)[4:]


async def test_all_sequences_of_a_step_are_told_together(open_bench: Any, make_spec: MakeSpec) -> None:
    async with open_bench() as bench:
        bench.engine.hold()
        specs = {bench.reserve(i, make_spec(5, 4, salt=i)): make_spec(5, 4, salt=i) for i in (1, 2, 3)}
        for handle, spec in specs.items():
            bench.hand_off(await bench.ticket(handle), spec)
        bench.engine.let_go()
        await bench.router.until(lambda: set(specs) == set(bench.router.ended))
        assert bench.router.order == [(1, 0), (2, 0), (3, 0)] * 3


async def test_an_end_token_ends_the_sequence(open_bench: Any, make_spec: MakeSpec, completion: Completion) -> None:
    async with open_bench() as bench:
        third = completion(make_spec(5, 20))[2]
        handle = bench.reserve(1, make_spec(5, 20, end=frozenset({third})), local_prefill=True)
        await bench.router.until(lambda: handle in bench.router.ended)
        assert len(bench.router.tokens[handle]) <= 3
        assert bench.router.tokens[handle][-1] == third


async def test_more_sequences_than_the_pool_holds_are_preempted_and_still_exact(
    open_bench: Any, make_spec: MakeSpec, completion: Completion
) -> None:
    async with open_bench(num_blocks=14, max_seqs=6) as bench:
        specs = {Handle(i): make_spec(5 + i, 20, salt=i) for i in range(6)}
        for handle, spec in specs.items():
            bench.reserve(handle, spec, local_prefill=True)
        await bench.router.until(lambda: set(specs) == set(bench.router.ended))
        assert {h: completion(s) for h, s in specs.items()} == bench.router.tokens
        assert bench.worker.load().preemptions > 0


async def test_a_sequence_as_large_as_the_pool_is_served(
    open_bench: Any, make_spec: MakeSpec, completion: Completion
) -> None:
    async with open_bench(num_blocks=4, block_size=4) as bench:
        spec = make_spec(15, 1)
        handle = bench.reserve(1, spec, local_prefill=True)
        await bench.router.until(lambda: handle in bench.router.ended)
        assert bench.router.tokens[handle] == completion(spec)
        assert bench.router.finished[handle, 0] is FinishReason.LENGTH


async def test_unused_slots_are_counted_as_the_sequence_grows(open_bench: Any, make_spec: MakeSpec) -> None:
    async with open_bench(block_size=4) as bench:
        spec = make_spec(5, 9)
        handle = bench.reserve(1, spec)
        ticket = await bench.ticket(handle)
        bench.engine.hold()
        bench.hand_off(ticket, spec)
        assert bench.worker.load().pool.unused_slots == 3
        bench.engine.let_go()
        await bench.router.until(lambda: handle in bench.router.ended)


@pytest.mark.parametrize("stage", ["queued", "reserved", "receiving", "in a step", "between steps"])
@pytest.mark.parametrize("how", ["release", "router lost", "deadline"])
async def test_it_can_end_in_every_stage(open_bench: Any, make_spec: MakeSpec, stage: str, how: str) -> None:
    async with open_bench(num_blocks=8) as bench:
        spec = make_spec(9, 15, timeout_s=3.0)
        blocker = bench.reserve(7, make_spec(25, 7)) if stage == "queued" else None
        if blocker is not None:
            await bench.ticket(blocker)
        handle = bench.reserve(1, spec)
        ticket = "" if stage == "queued" else await bench.ticket(handle)
        if stage == "receiving":
            bench.receiver.show(ticket)
        if stage == "in a step":
            bench.engine.hold()
            bench.hand_off(ticket, spec)
            await bench.engine.until_launched(1)
        if stage == "between steps":
            bench.hand_off(ticket, spec)
        end(bench, handle, how)
        assert isinstance(bench.router.errors.get(handle), DeadlineExceeded) == (how == "deadline")
        if stage == "in a step":
            assert bench.pool.counts().live >= 3, "freed under the engine"
        if stage == "receiving":
            assert bench.pool.counts().quarantined == 3, "freed under the writer"
            bench.receiver.writer_stops(ticket)
        bench.engine.let_go()
        if blocker is not None:
            bench.worker.release(bench.router, blocker)
        await bench.settled()
        assert handle not in bench.router.ended


def end(bench: Any, handle: Handle, how: str) -> None:
    if how == "release":
        bench.worker.release(bench.router, handle)
        bench.worker.release(bench.router, handle)
    elif how == "router lost":
        bench.worker.router_lost(bench.router)
    else:
        bench.clock.advance_s(3.5)
        bench.worker.tick()


async def test_a_loss_of_one_router_leaves_the_other_ones_sequences(
    open_bench: Any, make_spec: MakeSpec, completion: Completion
) -> None:
    async with open_bench() as bench:
        spec = make_spec(9, 7)
        handle = bench.reserve(1, spec)
        other = type(bench.router)()
        bench.reserve(1, spec, local_prefill=True, router=other)
        bench.worker.router_lost(bench.router)
        await other.until(lambda: handle in other.ended)
        assert other.tokens[handle] == completion(spec)


async def test_a_commit_that_never_comes_fails_the_sequence_without_new_work(
    open_bench: Any, make_spec: MakeSpec
) -> None:
    async with open_bench() as bench:
        handle = bench.reserve(1, make_spec(9, 7))
        ticket = await bench.ticket(handle)
        bench.receiver.show(ticket)
        bench.clock.advance_s(HANDOFF_S + 0.5)
        bench.worker.tick()
        assert isinstance(bench.router.errors[handle], TransferError)
        bench.receiver.writer_stops(ticket)


async def test_a_shown_ticket_outlasts_a_long_computation_at_the_prefill_worker(
    open_bench: Any, make_spec: MakeSpec
) -> None:
    async with open_bench() as bench:
        spec = make_spec(9, 7)
        handle = bench.reserve(1, spec)
        ticket = await bench.ticket(handle)
        bench.receiver.show(ticket)
        bench.clock.advance_s(600.0)
        bench.worker.tick()
        assert not bench.router.errors
        bench.hand_off(ticket, spec)
        await bench.router.until(lambda: handle in bench.router.ended)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"12345",
        encode_first_tokens({}),
        encode_first_tokens({0: TokenId(999_999)}),
        encode_first_tokens({1: TokenId(7)}),
        encode_first_tokens({0: TokenId(7), 1: TokenId(7)}),
    ],
)
async def test_a_first_token_that_is_none_fails_the_sequence(
    open_bench: Any, make_spec: MakeSpec, payload: bytes
) -> None:
    async with open_bench() as bench:
        handle = bench.reserve(1, make_spec(9, 7))
        ticket = await bench.ticket(handle)
        bench.receiver.show(ticket)
        bench.receiver.commit(ticket, payload)
        assert isinstance(bench.router.errors[handle], FrameError)


async def test_a_ticket_shown_twice_is_refused(open_bench: Any, make_spec: MakeSpec) -> None:
    async with open_bench() as bench:
        handle = bench.reserve(1, make_spec(9, 7))
        ticket = await bench.ticket(handle)
        bench.receiver.show(ticket)
        with pytest.raises(TicketRefused):
            bench.receiver.show(ticket)
        bench.worker.release(bench.router, handle)
        bench.receiver.writer_stops(ticket)


@pytest.mark.parametrize("error", [ZeroDivisionError(), InternalError("our own")])
async def test_a_step_that_breaks_fails_its_sequences_and_the_next_one_is_served(
    open_bench: Any, make_spec: MakeSpec, completion: Completion, error: Exception
) -> None:
    async with open_bench() as bench:
        bench.engine.errors[0] = error
        unlucky = bench.reserve(1, make_spec(5, 7), local_prefill=True)
        await bench.router.until(lambda: unlucky in bench.router.errors)
        assert isinstance(bench.router.errors[unlucky], InternalError)
        assert bench.router.errors[unlucky].retryable
        spec = make_spec(5, 7, salt=3)
        handle = bench.reserve(2, spec, local_prefill=True)
        await bench.router.until(lambda: handle in bench.router.ended)
        assert bench.router.tokens[handle] == completion(spec)


@pytest.mark.parametrize("output_index", [0, 2])
async def test_a_sequence_whose_logits_break_fails_alone(
    open_bench: Any, make_spec: MakeSpec, completion: Completion, output_index: int
) -> None:
    async with open_bench() as bench:
        bench.engine.breaks = (13, output_index)
        good = {bench.reserve(i, make_spec(5, 9, salt=i), local_prefill=True): make_spec(5, 9, salt=i) for i in (1, 2)}
        spec = make_spec(5, 9, salt=3)
        spec = replace(spec, sampling=replace(spec.sampling, seed=13))
        bad = bench.reserve(3, spec, local_prefill=True)
        await bench.router.until(lambda: bad in bench.router.errors and set(good) == set(bench.router.ended))
        assert isinstance(bench.router.errors[bad], InternalError)
        assert bench.router.errors[bad].retryable
        assert "request r3 " in bench.router.errors[bad].message
        assert bench.router.tokens.get(bad, []) == completion(spec)[:output_index]
        assert {handle: completion(spec) for handle, spec in good.items()} == {h: bench.router.tokens[h] for h in good}


async def test_a_broken_engine_ends_the_worker(open_bench: Any, make_spec: MakeSpec) -> None:
    async with open_bench() as bench:
        bench.engine.errors[0] = EngineBroken("8 steps in a row failed")
        unlucky = bench.reserve(1, make_spec(5, 7), local_prefill=True)

        with pytest.raises(EngineBroken):
            await bench.running

        assert isinstance(bench.router.errors[unlucky], InternalError)
        assert bench.router.errors[unlucky].retryable


async def test_a_full_line_is_overload(open_bench: Any, make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reservations, "MAX_QUEUED", 2)
    async with open_bench(num_blocks=4) as bench:
        handles = [bench.reserve(i, make_spec(9, 7)) for i in range(3)]
        assert isinstance(bench.router.errors[handles[2]], Overloaded)
        assert bench.recorded.sequences[2].names == ["SequenceEnded"]
        for handle in handles:
            bench.worker.release(bench.router, handle)


async def test_the_more_urgent_goes_first_then_the_earlier(open_bench: Any, make_spec: MakeSpec) -> None:
    async with open_bench(num_blocks=4) as bench:
        bench.reserve(1, make_spec(9, 7))
        await bench.ticket(Handle(1))
        for handle, priority in ((2, 0), (3, 5), (4, 5), (5, 0)):
            bench.reserve(handle, make_spec(9, 7, priority=priority))
        for done, following in ((1, 3), (3, 4), (4, 2), (2, 5)):
            bench.worker.release(bench.router, Handle(done))
            await bench.ticket(Handle(following))
        bench.worker.release(bench.router, Handle(5))
        assert list(bench.router.tickets) == [1, 3, 4, 2, 5]


async def test_bad_requests_are_refused_by_name(open_bench: Any, make_spec: MakeSpec) -> None:
    async with open_bench(num_blocks=4) as bench:
        bench.reserve(1, make_spec(9, 8))
        with pytest.raises(InvalidRequest, match="decode worker"):
            bench.worker.prefill(bench.router, Handle(2), make_spec(5, 2), "decode-1")
        with pytest.raises(InvalidRequest, match="decode worker"):
            bench.worker.grant(bench.router, Handle(2), b"", b"")
        bench.reserve(3, make_spec(5, 2))
        bench.reserve(3, make_spec(5, 2))
        errors = bench.router.errors
        assert [error.field for error in errors.values() if isinstance(error, InvalidRequest)] == [
            "sampling.max_tokens",
            "handle",
        ]
        bench.worker.release(bench.router, Handle(3))
        assert len(bench.recorded.sequences) == 1, "a request that is refused was never here"


async def test_a_draining_worker_finishes_what_it_has_and_takes_nothing_new(
    open_bench: Any, make_spec: MakeSpec, completion: Completion
) -> None:
    async with open_bench() as bench:
        spec = make_spec(9, 7)
        old = bench.reserve(1, spec)
        bench.worker.drain()
        new = bench.reserve(2, spec)
        error = bench.router.errors[new]
        assert isinstance(error, Unavailable)
        assert error.reason is Reason.DRAINING
        bench.hand_off(await bench.ticket(old), spec)
        await asyncio.wait_for(bench.worker.drained(), 30)
        assert bench.router.tokens[old] == completion(spec)[1:]
        assert bench.worker.load().draining


async def test_the_load_tells_the_truth(open_bench: Any, make_spec: MakeSpec) -> None:
    async with open_bench(num_blocks=6) as bench:
        waiting, landing = make_spec(9, 7, salt=1), make_spec(9, 7, salt=2)
        bench.reserve(1, landing)
        await bench.ticket(Handle(1))
        bench.reserve(2, waiting)
        load = bench.worker.load()
        assert (load.waiting_seqs, load.queued_prompt_tokens, load.live_transfers) == (1, 9, 1)
        assert load.pool.reserved == 3
        for handle in (1, 2):
            bench.worker.release(bench.router, Handle(handle))
