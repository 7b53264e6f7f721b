"""Offers that start anywhere in their sequence: what the receiver holds already does not travel."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.ticket import MAX_BLOCKS
from tandem.errors import InternalError, TransferError
from tests.kv_ends import RECEIVED, Recorder, ends, paired
from tests.transports import EVERY, SharedPool

TARGETS, SOURCES = (3, 1, 2, 8), (9, 4, 5, 7)
NUM_BLOCKS = 24


@pytest.mark.parametrize("transport", EVERY)
@pytest.mark.parametrize("held", range(5))
async def test_only_blocks_that_the_receiver_lacks_travel(recorder: Recorder, transport: str, held: int) -> None:
    async with paired(transport) as pair:
        before = pair.target.blocks.clone()
        handoff = await pair.open(pair.offer(recorder, TARGETS[held:], first_block=held))
        assert handoff.first_block == held
        if held < 4 or transport == "tcp":  # an empty offer needs no push, and takes one
            await handoff.push(held, SOURCES[held:])
        report = await handoff.commit(b"first")
        assert (recorder.calls, recorder.payload) == (RECEIVED, b"first")
        assert pair.landed(SOURCES[held:], TARGETS[held:])
        untouched = [i for i in range(16) if i not in TARGETS[held:]]
        assert torch.equal(pair.target.blocks[untouched], before[untouched])
        assert (report.num_blocks, report.num_bytes) == (4 - held, (4 - held) * 256)


@pytest.mark.parametrize(
    ("first", "sources"),
    [(0, (0,)), (1, (0, 1)), (3, (0, 1, 2)), (5, (0,)), (6, ()), (-2, (0,)), (2, (16,)), (2, (-1,))],
)
async def test_a_sender_refuses_positions_outside_the_offer_and_blocks_outside_the_pool(
    recorder: Recorder, first: int, sources: tuple[int, ...]
) -> None:
    async with paired("shm") as pair:
        handoff = await pair.open(pair.offer(recorder, (3, 1, 2), first_block=2))
        with pytest.raises(TransferError, match=r"leave the (offer of 2:5|pool)"):
            await handoff.push(first, sources)


@pytest.mark.parametrize(
    ("block_ids", "first_block"), [((), 0), ((1,), -1), ((), -1), ((1,), MAX_BLOCKS), ((), MAX_BLOCKS + 1)]
)
async def test_an_offer_of_no_sequence_is_our_own_bug(
    recorder: Recorder, block_ids: tuple[int, ...], first_block: int
) -> None:
    async with paired("tcp") as pair:
        with pytest.raises(InternalError):
            pair.offer(recorder, block_ids, first_block=first_block)
        assert pair.receiver.num_live == 0


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, int]]]:
    """Blocks of a sequence, how many of them are held, and the others cut into pushes in any order."""
    num_blocks = draw(st.integers(1, NUM_BLOCKS))
    held = draw(st.integers(0, num_blocks))
    cuts = sorted(draw(st.sets(st.integers(held, num_blocks))) | {held, num_blocks})
    return num_blocks, held, draw(st.permutations(list(pairwise(cuts))))


@given(plans(), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_any_start_and_any_order_of_pushes_completes_the_sequence(
    plan: tuple[int, int, list[tuple[int, int]]], rng: Any
) -> None:
    num_blocks, held, pushes = plan
    sources, targets = (rng.sample(range(NUM_BLOCKS), num_blocks) for _ in range(2))

    async def hand_over() -> None:
        async with ends(SharedPool(NUM_BLOCKS), SharedPool(NUM_BLOCKS), "tcp", ("tcp",)) as pair:
            pair.target.blocks[targets[:held]] = pair.source.blocks[sources[:held]]  # what decode holds already
            before, recorder = pair.target.blocks.clone(), Recorder()
            handoff = await pair.open(pair.offer(recorder, targets[held:], first_block=held))
            for first, end in pushes:
                await handoff.push(first, tuple(sources[first:end]))
            assert (await handoff.commit(b"")).num_blocks == num_blocks - held
            assert recorder.calls == RECEIVED
            assert pair.landed(sources, targets)
            untouched = [block for block in range(NUM_BLOCKS) if block not in targets[held:]]
            assert torch.equal(pair.target.blocks[untouched], before[untouched])

    asyncio.run(hand_over())
