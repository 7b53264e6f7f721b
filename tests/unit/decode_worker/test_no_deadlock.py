"""Reservations that hold blocks and sequences that need them never block each other for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decode_worker.landing import LandingPolicy
from tandem.types import Handle, SequenceSpec, TokenId

BLOCK_SIZE, HANDOFF_S, TURNS = 4, 10.0, 3000


@dataclass(frozen=True)
class Arriving:
    num_prompt_tokens: int
    max_tokens: int
    priority: int
    fate: str
    """`local`, or what becomes of its hand-off."""


@st.composite
def crowds(draw: st.DrawFn) -> tuple[int, list[Arriving]]:
    """A pool, and more work than it holds; each sequence alone fits."""
    num_blocks = draw(st.integers(4, 12))
    num_slots = num_blocks * BLOCK_SIZE
    crowd = []
    for _ in range(draw(st.integers(1, 9))):
        num_prompt_tokens = draw(st.integers(1, num_slots - 1))
        max_tokens = draw(st.integers(1, num_slots - num_prompt_tokens))
        fate = draw(st.sampled_from(["local", "commits", "commits", "fails", "stalls", "stalls under its writer"]))
        crowd.append(Arriving(num_prompt_tokens, max_tokens, draw(st.sampled_from([0, 0, 1])), fate))
    return num_blocks, crowd


@given(crowds())
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_everybody_ends_and_every_survivor_is_exact(
    open_bench: Any,
    make_spec: Callable[..., SequenceSpec],
    completion: Callable[[SequenceSpec], list[TokenId]],
    case: tuple[int, list[Arriving]],
) -> None:
    asyncio.run(play(open_bench, make_spec, completion, *case))


async def play(open_bench: Any, make_spec: Any, completion: Any, num_blocks: int, crowd: list[Arriving]) -> None:
    policy = LandingPolicy(ticket_s=HANDOFF_S, handoff_s=HANDOFF_S)
    async with open_bench(num_blocks, BLOCK_SIZE, max_seqs=4, chunk_tokens=6, landing=policy) as bench:
        specs: dict[Handle, SequenceSpec] = {}
        for number, each in enumerate(crowd):
            spec = make_spec(each.num_prompt_tokens, each.max_tokens, salt=number, priority=each.priority)
            specs[bench.reserve(number, spec, local_prefill=each.fate == "local")] = spec
        first = await play_prefill_workers(bench, specs, crowd)
        for transfer_id in bench.receiver.offers:
            bench.receiver.writer_stops(transfer_id)
        for handle, spec in specs.items():
            if crowd[handle].fate in {"local", "commits"}:
                assert first.get(handle, []) + bench.router.tokens.get(handle, []) == completion(spec)
            else:
                assert handle in bench.router.errors


async def play_prefill_workers(
    bench: Any, specs: dict[Handle, SequenceSpec], crowd: list[Arriving]
) -> dict[Handle, list[TokenId]]:
    """Lets each granted hand-off meet its fate until everybody has ended; returns the first tokens."""
    router, met, first = bench.router, set(), {}
    for turn in range(TURNS):
        for handle in router.tickets.keys() - met:
            met.add(handle)
            token = meet_fate(bench, router.tickets[handle], crowd[handle].fate, specs[handle])
            first |= {} if token is None else {handle: [token]}
        if len(router.ended) + len(router.errors) + only_first(specs, first) == len(specs):
            return first
        if turn % 100 == 99:  # all that can end by itself has ended
            let_time_pass(bench)
        await asyncio.sleep(0)
    raise AssertionError(f"stuck: {bench.worker.load()}")


def let_time_pass(bench: Any) -> None:
    bench.clock.advance_s(HANDOFF_S / 2)
    bench.worker.tick()
    for transfer_id, offer in bench.receiver.offers.items():
        if offer.is_over and offer.is_shown:
            bench.receiver.writer_stops(transfer_id)


def meet_fate(bench: Any, ticket: str, fate: str, spec: SequenceSpec) -> TokenId | None:
    if fate == "commits":
        token: TokenId = bench.hand_over(ticket, spec)
        return token
    if fate in {"fails", "stalls under its writer"}:
        bench.receiver.show(ticket)
    if fate == "fails":
        bench.receiver.fail(ticket)
    return None


def only_first(specs: dict[Handle, SequenceSpec], first: dict[Handle, list[TokenId]]) -> int:
    """Sequences that ended with their first token: there is nothing to tell of them."""
    return sum(specs[handle].sampling.max_tokens == 1 for handle in first)
