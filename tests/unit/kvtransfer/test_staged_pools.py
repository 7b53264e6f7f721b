"""Hand-offs between pools that are staged through host rows: when bytes are copied, and what is said when."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvtransfer.base import BlockRef, Handoff, Offer, Receiver, Sender
from kvtransfer.receiver import KvReceiver
from kvtransfer.rows import Rows
from kvtransfer.sender import KvSender
from kvtransfer.timing import Timing
from tandem.errors import TransferError
from tandem.types import BlockId
from tests.inproc_transport import InprocNetwork, InprocReceiver, InprocSender
from tests.manual_clock import ManualClock
from tests.transports import STAGED

SOURCES, TARGETS = (BlockId(2), BlockId(9), BlockId(3)), (BlockId(4), BlockId(5), BlockId(0))
NUM_BLOCKS, RING_ROWS = 1000, 512
WAYS = [*STAGED, "inproc"]
PATIENCE_S = 20.0


class GatedStaging:
    """A pool beside its ring; a copy waits for its gate, takes its time, and may break."""

    def __init__(self, pool: torch.Tensor, clock: ManualClock) -> None:
        self.pool = pool
        self.num_blocks = len(pool)
        self._blocks = Rows(pool.numpy())
        self.gate = asyncio.Event()
        self.gate.set()
        self.begun = asyncio.Event()
        self.error: TransferError | None = None
        self.copy_s = 0.0
        self._clock = clock

    async def copy_out(self, block_ids: Sequence[BlockId], into: Rows, rows: Sequence[int]) -> None:
        await self._to_the_end(self._blocks, block_ids, into, rows)

    async def copy_in(self, source: Rows, rows: Sequence[int], block_ids: Sequence[BlockId]) -> None:
        await self._to_the_end(source, rows, self._blocks, block_ids)

    async def _to_the_end(self, source: Rows, sources: Sequence[int], target: Rows, targets: Sequence[int]) -> None:
        self.begun.set()
        copy = asyncio.ensure_future(self._copy(source, list(sources), target, list(targets)))
        cancelled = False
        while not copy.done():
            try:
                await asyncio.wait({copy})
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError
        copy.result()

    async def _copy(self, source: Rows, sources: list[int], target: Rows, targets: list[int]) -> None:
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        target.array[targets] = source.array[sources]
        self._clock.advance_s(self.copy_s)


@dataclass
class Pair:
    """Both sides, staged, in one loop."""

    sender: Sender
    receiver: Receiver
    out: GatedStaging
    into: GatedStaging

    def offer(self, listener: Any) -> Offer:
        return self.receiver.offer(tuple(BlockRef(block, 1) for block in TARGETS), listener, 60.0)

    async def open(self, offer: Offer) -> Handoff:
        return await self.sender.open(offer.ticket, offer.endpoint, 5.0)

    def arrived(self) -> bool:
        return torch.equal(self.into.pool[list(TARGETS)], self.out.pool[list(SOURCES)])


@pytest.fixture
def staged(make_pool: Callable[..., Any], prints: Any, patient: Timing) -> Callable[..., Any]:
    """`async with staged("shm") as pair`."""

    @asynccontextmanager
    async def opened(way: str, timing: Timing = patient) -> AsyncIterator[Pair]:
        clock = ManualClock()
        source, target = make_pool(RING_ROWS), make_pool(RING_ROWS)
        out = GatedStaging(torch.randint(0, 256, (NUM_BLOCKS, prints.layout.block_bytes), dtype=torch.uint8), clock)
        into = GatedStaging(torch.zeros_like(out.pool), clock)
        sending = dataclasses.replace(source.memory, staging=out)
        receiving = dataclasses.replace(target.memory, staging=into)
        sender: Sender
        receiver: Receiver
        if way == "inproc":
            network = InprocNetwork()
            sender = InprocSender(sending, prints, clock, network)
            receiver = InprocReceiver(receiving, prints, clock, network)
        else:
            sender = KvSender(sending, prints, clock, way, timing=timing)
            receiver = KvReceiver(receiving, prints, clock, (way,), "127.0.0.1", timing=timing)
        await receiver.start()
        try:
            yield Pair(sender, receiver, out, into)
        finally:
            for staging in (out, into):
                staging.gate.set()
            await sender.stop()
            await receiver.stop()
            assert receiver.num_live == 0

    return opened


async def push_all(handoff: Handoff) -> None:
    await handoff.push(0, SOURCES[:2])
    await handoff.push(2, SOURCES[2:])


async def push_all_and_commit(handoff: Handoff) -> None:
    await push_all(handoff)
    await handoff.commit(b"")


@pytest.mark.parametrize("way", WAYS)
async def test_blocks_go_from_pool_to_pool(staged: Callable[..., Any], recorder: Any, way: str) -> None:
    async with staged(way) as pair:
        handoff = await pair.open(pair.offer(recorder))
        await push_all(handoff)
        await handoff.commit(b"first")
        assert recorder.payload == b"first"
        assert pair.arrived()


@pytest.mark.parametrize("way", STAGED)
async def test_neither_side_is_told_of_a_commit_before_the_blocks_are_in_the_pool(
    staged: Callable[..., Any], recorder: Any, way: str
) -> None:
    async with staged(way) as pair:
        pair.into.gate.clear()
        handoff = await pair.open(pair.offer(recorder))
        await push_all(handoff)
        committing = asyncio.create_task(handoff.commit(b""))
        await asyncio.wait({committing}, timeout=0.2)
        assert not committing.done()
        assert recorder.calls == ["receiving"]
        assert not pair.arrived()
        pair.into.gate.set()
        assert (await committing).num_blocks == 3
        assert recorder.calls == ["receiving", "committed"]
        assert pair.arrived()


@pytest.mark.parametrize("way", WAYS)
async def test_the_report_counts_staging_on_both_sides(staged: Callable[..., Any], recorder: Any, way: str) -> None:
    async with staged(way) as pair:
        pair.out.copy_s, pair.into.copy_s = 3.0, 2.0
        handoff = await pair.open(pair.offer(recorder))
        await handoff.push(0, SOURCES)
        assert (await handoff.commit(b"")).seconds == 5.0


@pytest.mark.parametrize("way", WAYS)
async def test_a_copy_into_the_pool_that_fails_fails_the_hand_off_on_both_sides(
    staged: Callable[..., Any], recorder: Any, way: str
) -> None:
    async with staged(way) as pair:
        pair.into.error = TransferError("the device is gone")
        handoff = await pair.open(pair.offer(recorder))
        with pytest.raises(TransferError, match="the device is gone"):
            await push_all_and_commit(handoff)
        await recorder.until("writer_stopped")
        assert recorder.calls == ["receiving", "failed", "writer_stopped"]
        assert recorder.error is pair.into.error


@pytest.mark.parametrize("way", WAYS)
async def test_a_copy_out_of_the_pool_that_fails_pushes_nothing(
    staged: Callable[..., Any], recorder: Any, way: str
) -> None:
    async with staged(way) as pair:
        pair.out.error = TransferError("the device is gone")
        handoff = await pair.open(pair.offer(recorder))
        with pytest.raises(TransferError, match="the device is gone"):
            await handoff.push(0, SOURCES)
        with pytest.raises(TransferError, match="0 of 3 blocks"):
            await handoff.commit(b"")
        assert recorder.calls == ["receiving", "failed", "writer_stopped"]


@pytest.mark.parametrize("way", WAYS)
async def test_blocks_withdrawn_under_a_copy_into_them_wait_for_its_end(
    staged: Callable[..., Any], recorder: Any, way: str
) -> None:
    async with staged(way) as pair:
        pair.into.gate.clear()
        offer = pair.offer(recorder)
        handoff = await pair.open(offer)
        pushing = asyncio.create_task(handoff.push(0, SOURCES))
        await asyncio.wait_for(pair.into.begun.wait(), PATIENCE_S)
        pair.receiver.withdraw(offer.transfer_id)
        assert recorder.calls == ["receiving", "failed"]
        await asyncio.wait({pushing}, timeout=0.2)  # the sender has heard of it, and has let go
        assert recorder.calls == ["receiving", "failed"]
        assert pair.receiver.num_live == 1
        pair.into.gate.set()
        await recorder.until("writer_stopped")
        await asyncio.gather(pushing, return_exceptions=True)
        assert pair.receiver.num_live == 0


@pytest.mark.parametrize("way", STAGED)
async def test_a_peer_lost_under_a_copy_frees_its_blocks_only_when_the_copy_has_ended(
    staged: Callable[..., Any], recorder: Any, way: str
) -> None:
    async with staged(way) as pair:
        pair.into.gate.clear()
        handoff = await pair.open(pair.offer(recorder))
        await handoff.push(0, SOURCES)
        await asyncio.wait_for(pair.into.begun.wait(), PATIENCE_S)
        await pair.sender.stop()
        assert recorder.calls == ["receiving"]
        pair.into.gate.set()
        await recorder.until("writer_stopped")
        assert recorder.calls == ["receiving", "failed", "writer_stopped"]


async def test_stop_returns_only_when_a_copy_has_ended(staged: Callable[..., Any], recorder: Any) -> None:
    async with staged("tcp", Timing(lease_s=1.5, reply_s=2.0, stop_s=0.05)) as pair:
        pair.into.gate.clear()
        handoff = await pair.open(pair.offer(recorder))
        await handoff.push(0, SOURCES)
        await asyncio.wait_for(pair.into.begun.wait(), PATIENCE_S)
        stopping = asyncio.create_task(pair.receiver.stop())
        await asyncio.wait({stopping}, timeout=0.3)
        assert not stopping.done()
        assert recorder.calls == ["receiving", "failed"]
        pair.into.gate.set()
        await stopping
        assert recorder.calls == ["receiving", "failed", "writer_stopped"]


@pytest.mark.parametrize("way", STAGED)
async def test_abort_waits_for_a_copy_out_whose_push_was_cancelled(
    staged: Callable[..., Any], recorder: Any, way: str
) -> None:
    async with staged(way) as pair:
        pair.out.gate.clear()
        handoff = await pair.open(pair.offer(recorder))
        pushing = asyncio.create_task(handoff.push(0, SOURCES))
        await asyncio.wait_for(pair.out.begun.wait(), PATIENCE_S)
        pushing.cancel()
        aborting = asyncio.create_task(handoff.abort())
        await asyncio.wait({aborting}, timeout=0.1)
        assert not aborting.done()
        pair.out.gate.set()
        await aborting
        await recorder.until("writer_stopped")
