"""Beam searches on a decode worker: told whole at their end, exact beside others and in a pool that is too small."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest

from tandem.errors import FrameError, InvalidRequest
from tandem.first_tokens import encode_first_tokens
from tandem.types import FinishReason, GroupSpec, Handle, TokenId

MakeSpec = Callable[..., GroupSpec]
Completion = Callable[..., list[TokenId]]


def said(bench: Any, handle: Handle) -> list[list[TokenId]]:
    return [tokens for (of, _), tokens in sorted(bench.router.choices.items()) if of == handle]


def right(completion: Completion, spec: GroupSpec) -> list[list[TokenId]]:
    return [completion(spec, choice.index) for choice in spec.choices]


@pytest.mark.parametrize("local_prefill", [True, False])
@pytest.mark.parametrize("max_tokens", [1, 2, 9])
async def test_choices_are_told_whole_best_first_with_their_scores(
    open_bench: Any, make_spec: MakeSpec, completion: Completion, max_tokens: int, local_prefill: bool
) -> None:
    async with open_bench() as bench:
        spec = make_spec(6, max_tokens, n=3, beam_width=4)
        handle = bench.reserve(1, spec, local_prefill=local_prefill)
        if not local_prefill:
            bench.hand_off(await bench.ticket(handle), spec)
        await bench.router.until(lambda: handle in bench.router.ended)
        assert said(bench, handle) == right(completion, spec)
        assert [index for _, index in bench.router.order] == sorted(index for _, index in bench.router.order)
        scores = [bench.router.scores[handle, index] for index in range(3)]
        assert scores == sorted(scores, reverse=True)
        assert bench.router.finished[handle, 0] is FinishReason.LENGTH


async def test_searches_and_others_share_steps_and_neither_disturbs_the_other(
    open_bench: Any, make_spec: MakeSpec, completion: Completion
) -> None:
    async with open_bench(max_seqs=12) as bench:
        specs = {Handle(i): make_spec(5 + i, 12 + i, salt=i, n=1 + i % 2, beam_width=3 * (i % 2)) for i in range(5)}
        for handle, spec in specs.items():
            bench.reserve(handle, spec, local_prefill=True)
        await bench.router.until(lambda: set(specs) == set(bench.router.ended))
        assert {handle: said(bench, handle) for handle in specs} == {h: right(completion, s) for h, s in specs.items()}
        assert bench.engine.max_in_flight == 2


@pytest.mark.parametrize("block_size", [1, 4, 16])
async def test_searches_in_a_pool_too_small_for_them_are_preempted_and_still_exact(
    open_bench: Any, make_spec: MakeSpec, completion: Completion, block_size: int
) -> None:
    specs = {Handle(i): make_spec(5 + i, 40, salt=i, n=3, beam_width=3) for i in range(4)}
    num_blocks = max(each.max_pool_tokens(block_size) for each in specs.values()) // block_size
    async with open_bench(num_blocks, block_size, max_seqs=12) as bench:
        for handle, spec in specs.items():
            bench.reserve(handle, spec, local_prefill=True)
        await bench.router.until(lambda: set(specs) == set(bench.router.ended))
        assert {handle: said(bench, handle) for handle in specs} == {h: right(completion, s) for h, s in specs.items()}
        assert bench.worker.load().preemptions > 0


async def test_a_released_search_frees_its_beams(open_bench: Any, make_spec: MakeSpec) -> None:
    async with open_bench() as bench:
        bench.engine.hold()
        handle = bench.reserve(1, make_spec(6, 50, beam_width=4), local_prefill=True)
        bench.engine.allow(8)
        await bench.engine.until_launched(9)
        assert bench.worker.load().running_seqs == 4
        bench.worker.release(bench.router, handle)
        bench.engine.let_go()
        await bench.settled()
        assert bench.router.choices == {}


async def test_more_beams_than_seats_are_refused_by_name(open_bench: Any, make_spec: MakeSpec) -> None:
    async with open_bench(max_seqs=3) as bench:
        handle = bench.reserve(1, make_spec(beam_width=4))
        error = bench.router.errors[handle]
        assert isinstance(error, InvalidRequest)
        assert error.field == "sampling.beam_width"


@pytest.mark.parametrize(
    "payload",
    [
        encode_first_tokens({0: TokenId(7)}),
        encode_first_tokens(((TokenId(999_999), -1.0),)),
        struct.pack("!BBHIf", 3, 1, 1, 7, float("nan")),
    ],
)
async def test_what_cannot_start_a_search_fails_it_and_frees_its_blocks(
    open_bench: Any, make_spec: MakeSpec, payload: bytes
) -> None:
    async with open_bench() as bench:
        handle = bench.reserve(1, make_spec(beam_width=2))
        ticket = await bench.ticket(handle)
        bench.receiver.show(ticket)
        bench.receiver.commit(ticket, payload)
        assert isinstance(bench.router.errors[handle], FrameError)


async def test_candidates_start_nothing_that_is_no_search(open_bench: Any, make_spec: MakeSpec) -> None:
    async with open_bench() as bench:
        handle = bench.reserve(1, make_spec())
        ticket = await bench.ticket(handle)
        bench.receiver.show(ticket)
        bench.receiver.commit(ticket, encode_first_tokens(((TokenId(7), -1.0),)))
        assert isinstance(bench.router.errors[handle], FrameError)
