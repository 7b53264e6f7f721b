"""Offers that start anywhere in their sequence: what the receiver holds already does not travel."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.base import BlockRef, Fingerprints, PoolMemory
from kvtransfer.frame import FrameType
from kvtransfer.messages import Commit, Write, decode_error, digest_of
from kvtransfer.ticket import MAX_BLOCKS, Ticket
from tandem.errors import InternalError, TransferError
from tandem.kv_layout import DType, KvLayout
from tandem.types import BlockId, Incarnation
from tests.inproc_transport import InprocNetwork, InprocReceiver, InprocSender
from tests.manual_clock import ManualClock
from tests.transports import EVERY

BLOCK = bytes(range(256))
SUM = xxhash.xxh3_64_intdigest(BLOCK)
TARGETS, SOURCES = (3, 1, 2, 8), (9, 4, 5, 7)


@pytest.mark.parametrize("transport", EVERY)
@pytest.mark.parametrize("held", range(5))
async def test_only_blocks_that_the_receiver_lacks_travel(
    paired: Callable[..., Any], recorder: Any, transport: str, held: int
) -> None:
    async with paired(transport) as pair:
        before = pair.target.blocks.clone()
        handoff = await pair.open(pair.offer(recorder, TARGETS[held:], first_block=held))
        assert handoff.first_block == held
        await handoff.push(held, SOURCES[held:])
        report = await handoff.commit(b"first")
        assert recorder.calls == ["receiving", "committed"]
        assert recorder.payload == b"first"
        assert pair.landed(SOURCES[held:], TARGETS[held:])
        untouched = [i for i in range(16) if i not in TARGETS[held:]]
        assert torch.equal(pair.target.blocks[untouched], before[untouched])
        assert (report.num_blocks, report.num_bytes) == (4 - held, (4 - held) * 256)


@pytest.mark.parametrize("transport", EVERY)
async def test_an_empty_offer_needs_no_push(paired: Callable[..., Any], recorder: Any, transport: str) -> None:
    async with paired(transport) as pair:
        handoff = await pair.open(pair.offer(recorder, (), first_block=4))
        assert (await handoff.commit(b"first")).num_blocks == 0
        assert recorder.calls == ["receiving", "committed"]


@pytest.mark.parametrize(("first", "sources"), [(0, (0,)), (1, (0, 1)), (3, (0, 1, 2)), (5, (0,)), (6, ()), (-2, (0,))])
async def test_a_sender_refuses_positions_outside_the_offer(
    paired: Callable[..., Any], recorder: Any, first: int, sources: tuple[int, ...]
) -> None:
    async with paired("shm") as pair:
        handoff = await pair.open(pair.offer(recorder, (3, 1, 2), first_block=2))
        with pytest.raises(TransferError, match=r"leave the offer of 2:5"):
            await handoff.push(first, sources)


@pytest.mark.parametrize(
    "write", [Write(0, (SUM,)), Write(1, (SUM, SUM)), Write(4, (SUM, SUM)), Write(5, (SUM,)), Write(2**32 - 1, (SUM,))]
)
async def test_a_receiver_refuses_positions_outside_the_offer(
    paired: Callable[..., Any], recorder: Any, raw: Callable[..., Any], write: Write
) -> None:
    async with paired("tcp") as pair:
        before = pair.target.blocks.clone()
        offer = pair.offer(recorder, (3, 1, 2), first_block=2)
        async with raw(offer, "tcp") as peer:
            number = await peer.open(offer)
            inline = BLOCK * len(write.checksums)
            answer = await peer.ask(FrameType.WRITE, number, write.encode(), 0, inline)
            assert "leaves the offer of 2:5" in decode_error(answer.payload).message
        assert recorder.calls == ["receiving", "failed", "writer_stopped"]
        assert torch.equal(pair.target.blocks, before)


async def test_a_commit_alone_cannot_stand_for_blocks_that_were_offered(
    paired: Callable[..., Any], recorder: Any, raw: Callable[..., Any]
) -> None:
    async with paired("tcp") as pair:
        offer = pair.offer(recorder, (3,), first_block=7)
        async with raw(offer, "tcp") as peer:
            number = await peer.open(offer)
            answer = await peer.ask(FrameType.COMMIT, number, Commit(0, digest_of(()), b"").encode())
            assert "COMMIT after 0 of 1 blocks" in decode_error(answer.payload).message
        assert recorder.calls == ["receiving", "failed", "writer_stopped"]


@pytest.mark.parametrize(
    ("block_ids", "first_block"), [((), 0), ((1,), -1), ((), -1), ((1,), MAX_BLOCKS), ((), MAX_BLOCKS + 1)]
)
async def test_an_offer_of_no_sequence_is_our_own_bug(
    paired: Callable[..., Any], recorder: Any, block_ids: tuple[int, ...], first_block: int
) -> None:
    async with paired("tcp") as pair:
        with pytest.raises(InternalError):
            pair.offer(recorder, block_ids, first_block=first_block)
        assert pair.receiver.num_live == 0


async def test_the_ticket_says_where_the_offer_starts(paired: Callable[..., Any], recorder: Any) -> None:
    async with paired("tcp") as pair:
        ticket = Ticket.decode(pair.offer(recorder, (3, 1), first_block=6).ticket)
        assert (ticket.first_block, ticket.end) == (6, 8)


LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, block_size=1, head_dim=8, dtype=DType.BFLOAT16)
NUM_BLOCKS = 24


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, int]]]:
    """Blocks of a sequence, how many of them are held, and the others cut into pushes in any order."""
    num_blocks = draw(st.integers(1, NUM_BLOCKS))
    held = draw(st.integers(0, num_blocks))
    cuts = sorted(draw(st.sets(st.integers(held, num_blocks))) | {held, num_blocks})
    return num_blocks, held, draw(st.permutations(list(pairwise(cuts))))


@given(plans(), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_any_start_and_any_order_of_pushes_completes_the_sequence(
    plan: tuple[int, int, list[tuple[int, int]]], rng: Any
) -> None:
    num_blocks, held, pushes = plan
    sources, targets = (rng.sample(range(NUM_BLOCKS), num_blocks) for _ in range(2))
    source, target = (torch.randint(0, 256, (NUM_BLOCKS, LAYOUT.block_bytes), dtype=torch.uint8) for _ in range(2))
    target[targets[:held]] = source[sources[:held]]  # what decode holds already
    before = target.clone()
    calls: list[str] = []

    class Listener:
        def on_receiving(self) -> None:
            calls.append("receiving")

        def on_committed(self, first_token_payload: bytes) -> None:
            calls.append("committed")

        def on_failed(self, error: TransferError) -> None:
            calls.append("failed")

        def on_writer_stopped(self) -> None:
            calls.append("writer_stopped")

    async def hand_over() -> int:
        network, clock, prints = InprocNetwork(), ManualClock(), Fingerprints("m", LAYOUT)
        receiver = InprocReceiver(PoolMemory(target, None, new_life()), prints, clock, network)
        sender = InprocSender(PoolMemory(source, None, new_life()), prints, clock, network)
        await receiver.start()
        refs = tuple(BlockRef(BlockId(block), 0) for block in targets[held:])
        offer = receiver.offer(refs, Listener(), 5.0, held)
        handoff = await sender.open(offer.ticket, offer.endpoint, 5.0)
        for first, end in pushes:
            await handoff.push(first, tuple(BlockId(block) for block in sources[first:end]))
        report = await handoff.commit(b"")
        await sender.stop()
        await receiver.stop()
        return report.num_blocks

    assert asyncio.run(hand_over()) == num_blocks - held
    assert calls == ["receiving", "committed"]
    assert torch.equal(target[targets], source[sources])
    untouched = [block for block in range(NUM_BLOCKS) if block not in targets[held:]]
    assert torch.equal(target[untouched], before[untouched])


def new_life() -> Incarnation:
    return Incarnation(secrets.token_hex(16))
