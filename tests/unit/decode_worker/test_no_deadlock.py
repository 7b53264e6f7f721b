"""Reservations that hold blocks and sequences that need them never block each other for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decode_worker.incoming_transfers import HANDOFF_S
from decode_worker.reservations import STANDSTILL_S
from tandem.errors import Overloaded
from tandem.types import GroupSpec, Handle, TokenId

BLOCK_SIZE, TURNS = 4, 3000


@dataclass(frozen=True)
class Arriving:
    num_prompt_tokens: int
    max_tokens: int
    num_emitted: tuple[int, ...]
    """For each choice, how many tokens it has already."""
    priority: int
    fate: str
    """`local`, or what becomes of its hand-off."""
    prompt: int
    """Prompts of the same number begin alike, so that one's KV is the other's."""
    cache_salt: str
    beam_width: int = 0


@st.composite
def crowds(draw: st.DrawFn) -> tuple[int, int, bool, list[Arriving]]:
    """A pool, rows of a host tier, whether steps with prompts have one behind them, and more work than the pool holds;
    each group alone fits.
    """
    num_blocks = draw(st.integers(4, 12))
    crowd = []
    for _ in range(draw(st.integers(1, 9))):
        n = draw(st.sampled_from([1, 1, 2, 3, 4]))
        num_prompt_tokens = draw(st.integers(1, (num_blocks - n) * BLOCK_SIZE + (BLOCK_SIZE - 1 if n == 1 else 0) or 1))
        # Full blocks of the prompt are shared; the rest of the pool is for each choice's own.
        shared = num_prompt_tokens // BLOCK_SIZE
        most = (shared + (num_blocks - shared) // n) * BLOCK_SIZE - num_prompt_tokens
        max_tokens = draw(st.integers(1, max(1, most)))
        is_search = n > 1 and draw(st.booleans())
        num_emitted = tuple(draw(st.integers(0, max_tokens - 1)) if draw(st.booleans()) else 0 for _ in range(n))
        if is_search:
            num_emitted = (0,) * draw(st.integers(1, n))
        fate = draw(st.sampled_from(["local", "commits", "commits", "fails", "stalls", "stalls under its writer"]))
        priority, prompt = draw(st.sampled_from([0, 0, 1])), draw(st.integers(0, 2))
        salt = draw(st.sampled_from(["", "", "a"]))
        crowd.append(
            Arriving(num_prompt_tokens, max_tokens, num_emitted, priority, fate, prompt, salt, n if is_search else 0)
        )
    return num_blocks, draw(st.sampled_from([0, 0, 3, 20])), draw(st.booleans()), crowd


@given(crowds())
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_everybody_ends_and_every_survivor_is_exact(
    open_bench: Any,
    make_spec: Callable[..., GroupSpec],
    completion: Callable[..., list[TokenId]],
    case: tuple[int, int, bool, list[Arriving]],
) -> None:
    asyncio.run(play(open_bench, make_spec, completion, *case))


async def test_a_stream_that_lacks_what_is_reserved_for_a_prompt_long_in_coming_gets_it(
    open_bench: Any, make_spec: Callable[..., GroupSpec], completion: Callable[..., list[TokenId]]
) -> None:
    async with open_bench(8, BLOCK_SIZE) as bench:
        spec = make_spec(4, 24)
        running = bench.reserve(0, spec, local_prefill=True)
        coming = bench.reserve(1, make_spec(12, salt=1))
        ticket = await bench.ticket(coming)
        bench.receiver.show(ticket)
        await bench.router.until(lambda: len(bench.router.tokens.get(running, ())) == 17)  # its five blocks are full
        await asyncio.sleep(0.01)
        bench.worker.tick()
        bench.clock.advance_s(STANDSTILL_S / 2)
        bench.worker.tick()
        assert not bench.router.errors
        bench.clock.advance_s(STANDSTILL_S / 2)
        bench.worker.tick()
        bench.receiver.writer_stops(ticket)
        await bench.router.until(lambda: running in bench.router.ended)
        assert isinstance(bench.router.errors[coming], Overloaded)
        assert bench.router.choices[running, 0] == completion(spec, 0)


async def play(
    open_bench: Any,
    make_spec: Any,
    completion: Any,
    num_blocks: int,
    host_rows: int,
    is_asynchronous: bool,
    crowd: list[Arriving],
) -> None:
    sizes = {"max_seqs": 4, "chunk_tokens": 6, "host_rows": host_rows}
    async with open_bench(num_blocks, BLOCK_SIZE, **sizes, is_asynchronous=is_asynchronous) as bench:
        specs: dict[Handle, GroupSpec] = {}
        for number, each in enumerate(crowd):
            spec = make_spec(
                each.num_prompt_tokens,
                each.max_tokens,
                n=len(each.num_emitted),
                emitted=each.num_emitted,
                salt=each.prompt,
                priority=each.priority,
                cache_salt=each.cache_salt,
                beam_width=each.beam_width,
            )
            specs[bench.reserve(number, spec, local_prefill=each.fate == "local")] = spec
        first = await play_prefill_workers(bench, specs, crowd)
        for transfer_id in bench.receiver.offers:
            bench.receiver.writer_stops(transfer_id)
        for handle, spec in specs.items():
            if crowd[handle].fate not in {"local", "commits"}:
                assert handle in bench.router.errors
                continue
            for choice in spec.choices:
                known = [*choice.output_token_ids, *first.get((handle, choice.index), [])]
                known += bench.router.choices.get((handle, choice.index), [])
                assert known == completion(spec, choice.index)


async def play_prefill_workers(
    bench: Any, specs: dict[Handle, GroupSpec], crowd: list[Arriving]
) -> dict[tuple[Handle, int], list[TokenId]]:
    """Lets each granted hand-off meet its fate until everybody has ended; returns the first tokens of each choice."""
    router, met, first = bench.router, set(), {}
    for turn in range(TURNS):
        for handle in router.tickets.keys() - met:
            met.add(handle)
            tokens = meet_fate(bench, router.tickets[handle], crowd[handle].fate, specs[handle])
            first |= {(handle, index): [token] for index, token in tokens.items()}
        if len(router.ended) + len(router.errors) == len(specs):
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


def meet_fate(bench: Any, ticket: str, fate: str, spec: GroupSpec) -> dict[int, TokenId]:
    if fate == "commits":
        tokens: dict[int, TokenId] = bench.hand_off(ticket, spec)
        return tokens
    if fate in {"fails", "stalls under its writer"}:
        bench.receiver.show(ticket)
    if fate == "fails":
        bench.receiver.fail(ticket)
    return {}
