"""What the worker's cache knows is neither received nor computed again, and no token changes by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engine.step import Direction, Step
from tandem.errors import InternalError, Overloaded, PrefixNotHeld, TransferError
from tandem.types import GroupSpec, Handle, TokenId
from tests.decode_rows import seqs_of

MakeSpec = Callable[..., GroupSpec]
Completion = Callable[..., list[TokenId]]
IN = Direction.IN


def next_turn(spec: GroupSpec, completion: list[TokenId], *said: int, **changes: Any) -> GroupSpec:
    """The conversation goes on: all that was said, and some more."""
    prompt = (*spec.prompt_token_ids, *completion, *(TokenId(each) for each in said))
    return replace(spec, prompt_token_ids=prompt, **changes)


def num_computed(steps: list[Step]) -> int:
    return sum(len(seq.token_ids) for step in steps for seq in seqs_of(step))


async def finish(bench: Any, handle: Handle) -> list[list[TokenId]]:
    await bench.router.until(lambda: handle in bench.router.ended or handle in bench.router.errors)
    assert handle not in bench.router.errors
    return [tokens for (each, _), tokens in sorted(bench.router.choices.items()) if each == handle]


async def serve(bench: Any, number: int, spec: GroupSpec) -> list[TokenId]:
    """One choice, its prompt computed here."""
    (tokens,) = await finish(bench, bench.reserve(number, spec, local_prefill=True))
    return tokens


async def serve_handed_off(bench: Any, number: int, spec: GroupSpec) -> list[TokenId]:
    """One choice, its prompt handed over."""
    handle = bench.reserve(number, spec)
    first = bench.hand_off(await bench.ticket(handle), spec)[0]
    (tokens,) = await finish(bench, handle)
    return [first, *tokens]


@pytest.mark.parametrize(("block_size", "num_held"), [(1, 18), (4, 4), (16, 1), (256, 0)])
async def test_the_next_turn_is_offered_only_the_blocks_that_are_lacking(
    open_bench: Any, make_spec: MakeSpec, completion: Completion, block_size: int, num_held: int
) -> None:
    async with open_bench(num_blocks=64, block_size=block_size) as bench:
        spec = make_spec(13, 6)
        turn = next_turn(spec, await serve_handed_off(bench, 1, spec), 5, 6, 7)
        handle = bench.reserve(2, turn)
        ticket = await bench.ticket(handle)
        offer = bench.receiver.offers[ticket]
        # Of the last token that was drawn, nothing was computed.
        assert (offer.first_block, bench.router.held_tokens[handle]) == (num_held, num_held * block_size)
        assert len(offer.blocks) == -(-turn.num_prompt_tokens // block_size) - num_held
        assert bench.recorded.sequences[1].args("PrefixLookedUp") == (22, num_held * block_size)
        first = bench.hand_off(ticket, turn)[0]
        assert [first, *(await finish(bench, handle))[0]] == completion(turn)


async def test_another_salt_finds_nothing(open_bench: Any, make_spec: MakeSpec, completion: Completion) -> None:
    async with open_bench() as bench:
        for number, salt in enumerate(("", "a", "b", "a")):
            spec = make_spec(13, 3, cache_salt=salt)
            handle = bench.reserve(number, spec)
            first = bench.hand_off(await bench.ticket(handle), spec)[0]
            assert [first, *(await finish(bench, handle))[0]] == completion(spec)
            assert bench.router.held_tokens[handle] == (12 if number == 3 else 0)


@pytest.mark.parametrize("end", ["refused", "fails before it is shown", "fails", "released", "expires"])
async def test_a_hand_off_that_comes_to_nothing_gives_back_what_it_held_and_what_it_lacked(
    open_bench: Any, make_spec: MakeSpec, end: str
) -> None:
    async with open_bench(num_blocks=16) as bench:
        spec = make_spec(13, 6)
        turn = next_turn(spec, await serve_handed_off(bench, 1, spec), *range(9))
        if end == "refused":
            bench.receiver.refusal = Overloaded("too many offers")
            handle = bench.reserve(2, turn)
            await bench.router.until(lambda: bench.router.errors)
            assert bench.router.errors[handle] is bench.receiver.refusal
            assert bench.cache.num_available == 16
            return
        handle = bench.reserve(2, turn)
        ticket = await bench.ticket(handle)
        assert (bench.pool.counts().live, bench.pool.counts().reserved) == (4, 3)
        if end not in ("fails before it is shown", "expires"):
            bench.receiver.show(ticket)
        if end == "released":
            bench.worker.release(bench.router, handle)
        elif end == "expires":
            bench.clock.advance_s(10_000)
            bench.worker.tick()
        else:
            bench.receiver.fail(ticket)
        assert isinstance(bench.router.errors.get(handle), TransferError) == (end != "released")
        assert bench.pool.counts().live == 0
        assert bench.pool.counts().quarantined == (3 if end in ("fails", "released") else 0)
        if end in ("fails", "released"):
            bench.receiver.writer_stops(ticket)
        assert bench.cache.num_available == 16


@pytest.mark.parametrize(("block_size", "num_left"), [(1, 1), (4, 1), (16, 13), (256, 13)])
async def test_a_prompt_that_is_known_is_computed_from_its_last_block_on(
    open_bench: Any, make_spec: MakeSpec, completion: Completion, block_size: int, num_left: int
) -> None:
    async with open_bench(block_size=block_size) as bench:
        spec = make_spec(13, 1)
        await serve(bench, 1, spec)
        num_steps = len(bench.engine.steps)
        assert await serve(bench, 2, spec) == completion(spec)
        assert num_computed(bench.engine.steps[num_steps:]) == num_left
        assert bench.router.cached_tokens[Handle(2)] == 13 - num_left
        assert bench.recorded.sequences[1].args("PrefixLookedUp") == (13, 13 - num_left)


async def test_what_is_asked_for_while_a_prompt_is_computed_finds_the_chunks_that_have_ended(
    open_bench: Any, make_spec: MakeSpec, completion: Completion
) -> None:
    async with open_bench(chunk_tokens=16) as bench:
        spec, bench_steps = make_spec(40, 3), bench.engine.steps
        bench.engine.hold()
        first = bench.reserve(1, spec, local_prefill=True)
        bench.engine.allow()
        await bench.engine.until_launched(2)
        second = bench.reserve(2, spec, local_prefill=True)
        bench.engine.let_go()
        assert await finish(bench, first) == await finish(bench, second) == [completion(spec)]
        assert bench.router.cached_tokens == {first: 0, second: 32}
        assert num_computed(bench_steps) == 40 + 8 + 2 * 2


async def test_the_log_probabilities_of_a_prompt_are_not_read_from_a_cache(
    open_bench: Any, make_spec: MakeSpec, completion: Completion
) -> None:
    async with open_bench() as bench:
        spec = make_spec(13, 3)
        await serve(bench, 1, spec)
        asking = replace(spec, sampling=replace(spec.sampling, prompt_logprobs=1))
        assert await serve(bench, 2, asking) == completion(spec)
        assert bench.router.cached_tokens[Handle(2)] == 0


async def test_a_worker_that_may_compute_little_refuses_a_prompt_that_it_does_not_know(
    open_bench: Any, make_spec: MakeSpec, completion: Completion
) -> None:
    async with open_bench() as bench:
        spec = make_spec(13, 3)
        unknown = bench.reserve(1, spec, local_prefill=True, max_local_tokens=12)
        error = bench.router.errors[unknown]
        assert isinstance(error, PrefixNotHeld)
        assert error.retryable
        for handle, most in ((2, 13), (3, 1)):
            known = bench.reserve(handle, spec, local_prefill=True, max_local_tokens=most)
            assert await finish(bench, known) == [completion(spec)]
        salted = bench.reserve(4, replace(spec, cache_salt="a"), local_prefill=True, max_local_tokens=12)
        assert isinstance(bench.router.errors[salted], PrefixNotHeld)


async def test_a_prefix_that_goes_while_its_request_is_in_line_is_not_computed_here(
    open_bench: Any, make_spec: MakeSpec
) -> None:
    async with open_bench(num_blocks=8) as bench:
        spec = make_spec(13, 3)
        await serve(bench, 1, spec)
        holder = bench.reserve(2, make_spec(29, 3, salt=1))  # takes all blocks, known ones too
        waiting = bench.reserve(3, spec, local_prefill=True, max_local_tokens=4)
        await bench.ticket(holder)
        assert waiting not in bench.router.errors
        bench.worker.release(bench.router, holder)
        await bench.router.until(lambda: waiting in bench.router.errors)
        assert isinstance(bench.router.errors[waiting], PrefixNotHeld)


@pytest.mark.parametrize("n", [1, 3])
async def test_preempted_work_finds_again_what_was_not_given_to_others(
    open_bench: Any, make_spec: MakeSpec, completion: Completion, n: int
) -> None:
    async with open_bench() as bench:
        specs = [make_spec(18, 20, n=n), make_spec(5, 16, salt=1, priority=1)]
        bench.engine.hold()
        humble, urgent = [bench.reserve(number, each, local_prefill=True) for number, each in enumerate(specs)]
        bench.engine.allow(6)
        await bench.router.until(lambda: len(bench.router.choices.get((humble, 0), ())) == 4)
        taken = bench.pool.allocate(bench.pool.num_free)
        bench.engine.let_go()
        assert await finish(bench, urgent) == [completion(specs[1])]
        bench.pool.release(taken)
        bench.worker.tick()
        assert await finish(bench, humble) == [completion(specs[0], index) for index in range(n)]
        assert bench.worker.load().preemptions == 1
        undisturbed = 18 + 5 + 15 + n * 19
        again = num_computed(bench.engine.steps) - undisturbed
        assert again <= 4 * (n + 2), "more than a block for each, and those that the urgent one took"


async def test_a_released_request_leaves_what_it_had_computed(
    open_bench: Any, make_spec: MakeSpec, completion: Completion
) -> None:
    """As after a stop string, which only the router knows: what was said so far is the next prompt."""
    async with open_bench() as bench:
        spec = make_spec(13, 50)
        bench.engine.hold()
        handle = bench.reserve(1, spec, local_prefill=True)
        for number in range(8):
            await bench.engine.until_launched(number + 1)
            bench.engine.allow()
        await bench.router.until(lambda: len(bench.router.choices.get((handle, 0), ())) == 8)
        bench.worker.release(bench.router, handle)
        bench.engine.let_go()
        turn = next_turn(spec, completion(spec)[:8], 1, 2)
        assert await serve(bench, 2, turn) == completion(turn)
        assert bench.router.cached_tokens[Handle(2)] == 20  # 13 + 7 tokens were computed


async def test_what_a_failed_step_was_to_write_is_not_known(
    open_bench: Any, make_spec: MakeSpec, completion: Completion
) -> None:
    async with open_bench(chunk_tokens=16) as bench:
        bench.engine.errors[1] = InternalError("it broke")
        spec = make_spec(40, 3)
        handle = bench.reserve(1, spec, local_prefill=True)
        await bench.router.until(lambda: handle in bench.router.errors)
        assert await serve(bench, 2, spec) == completion(spec)
        assert bench.router.cached_tokens[Handle(2)] == 16


async def test_what_broken_logits_were_computed_from_is_not_known_any_more(
    open_bench: Any, make_spec: MakeSpec, completion: Completion
) -> None:
    async with open_bench() as bench:
        spec, other = make_spec(13, 9), make_spec(13, 9, salt=1)
        await serve(bench, 1, other)
        bench.engine.breaks = (spec.sampling.seed, 5)
        handle = bench.reserve(2, spec, local_prefill=True)
        await bench.router.until(lambda: handle in bench.router.errors)
        bench.engine.breaks = None
        assert await serve(bench, 3, spec) == completion(spec)
        assert await serve(bench, 4, other) == completion(other)
        assert [bench.router.cached_tokens[Handle(number)] for number in (3, 4)] == [0, 12]


@pytest.mark.parametrize("local_prefill", [True, False])
async def test_choices_of_a_broken_stream_find_their_own_paths(
    open_bench: Any, make_spec: MakeSpec, completion: Completion, local_prefill: bool
) -> None:
    async with open_bench() as bench:
        spec = make_spec(10, 30, n=3)
        await finish(bench, bench.reserve(1, spec, local_prefill=True))
        num_steps, emitted = len(bench.engine.steps), (17, 25, 0)
        resumed = make_spec(10, 30, n=3, emitted=emitted)
        handle = bench.reserve(2, resumed, local_prefill=local_prefill)
        first = {} if local_prefill else bench.hand_off(await bench.ticket(handle), resumed)
        rests = await finish(bench, handle)
        for index, (rest, count) in enumerate(zip(rests, emitted, strict=True)):
            come = [first[index]] if index in first else []
            assert [*come, *rest] == completion(spec, index)[count:]
        # Each resumed choice computes its last block, at most, and then each token that it draws.
        drawn = sum(30 - count for count in emitted)
        assert num_computed(bench.engine.steps[num_steps:]) <= 4 + 2 * 4 + drawn


async def test_with_the_cache_off_nothing_is_found(
    open_bench: Any, make_spec: MakeSpec, completion: Completion
) -> None:
    async with open_bench(prefix_cache=False) as bench:
        spec = make_spec(13, 6)
        for number in (1, 2):
            assert await serve(bench, number, spec) == completion(spec)
        assert bench.router.cached_tokens == {1: 0, 2: 0}
        assert bench.pool.counts().cached == 0


@pytest.mark.parametrize("handed_off", [False, True])
@pytest.mark.parametrize("fails", [False, True])
async def test_what_was_evicted_to_the_host_comes_back_with_a_step(
    open_bench: Any, make_spec: MakeSpec, completion: Completion, fails: bool, handed_off: bool
) -> None:
    async with open_bench(num_blocks=8, host_rows=32) as bench:
        spec = make_spec(21, 4)
        await serve(bench, 1, spec)
        await serve(bench, 2, make_spec(25, 4, salt=1))
        num_steps = len(bench.engine.steps)
        if fails:
            bench.engine.errors[num_steps] = InternalError("it broke")
            unlucky = bench.reserve(3, spec, local_prefill=True)
            await bench.router.until(lambda: unlucky in bench.router.errors)
        again = serve_handed_off if handed_off else serve
        assert await again(bench, 4, spec) == completion(spec)
        looked_up = bench.recorded.sequences[-1].args("PrefixLookedUp")
        assert looked_up == (21, 20)
        moved_in = [move for step in bench.engine.steps[num_steps:] for move in step.moves if move.direction is IN]
        assert len(moved_in) == (8 if fails else 4), "one block had stayed"
        assert num_computed(bench.engine.steps[num_steps:]) == 3 + fails + (not handed_off)


async def test_requests_with_one_long_prompt_run_together_in_a_pool_that_holds_it_once(
    open_bench: Any, make_spec: MakeSpec, completion: Completion
) -> None:
    async with open_bench(num_blocks=24) as bench:
        spec = make_spec(41, 8)  # 11 blocks, and 2 to grow
        bench.engine.hold()
        firsts: dict[Handle, TokenId] = {}
        for number in range(4):
            handle = bench.reserve(number, spec)
            firsts[handle] = bench.hand_off(await bench.ticket(handle), spec)[0]
        assert bench.pool.counts().live == 10 + 4
        bench.engine.let_go()
        for handle, first in firsts.items():
            assert [first, *(await finish(bench, handle))[0]] == completion(spec)


async def test_blocks_that_were_to_be_loaded_for_a_request_that_is_gone_are_nobodys(
    open_bench: Any, make_spec: MakeSpec
) -> None:
    async with open_bench(num_blocks=8, host_rows=8) as bench:
        spec = make_spec(13, 6)
        turn = next_turn(spec, await serve(bench, 1, spec), 5)
        await serve(bench, 2, make_spec(20, 10))
        handle = bench.reserve(3, turn)
        await bench.ticket(handle)
        assert bench.router.held_tokens[handle] == 16
        assert bench.cache.num_loaded(range(8)) < 8, "some are to be loaded"
        bench.worker.release(bench.router, handle)
