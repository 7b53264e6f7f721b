"""Hand-offs between pools that are staged through host rows: when bytes are copied, and what is said when."""

from __future__ import annotations

import asyncio

import pytest

from kvtransfer.timing import Timing
from tandem.errors import TransferError
from tests.kv_ends import FAILED, PATIENCE_S, PATIENT, RECEIVED, SOURCES, Recorder, ends, held_back, push_and_commit
from tests.transports import StagedPool

each_way = pytest.mark.parametrize("way", ["shm", "tcp"])


def staged(way: str, timing: Timing = PATIENT):
    """Rings with a row for each block: a push waits for no copy into the pool."""
    return ends(StagedPool(ring_rows=512), StagedPool(ring_rows=512), way, (way,), timing)


async def begun(pair):
    await asyncio.wait_for(pair.target.staging.begun.wait(), PATIENCE_S)


@each_way
async def test_neither_side_is_told_of_a_commit_before_the_blocks_are_in_the_pool(recorder: Recorder, way: str) -> None:
    async with staged(way) as pair:
        pair.target.staging.gate.clear()
        handoff = await pair.begin(recorder)
        await handoff.push(0, SOURCES[:2])
        await handoff.push(2, SOURCES[2:])
        committing = asyncio.create_task(handoff.commit(b"first"))
        assert await held_back(committing, 0.2)
        assert recorder.calls == ["receiving"]
        assert not pair.landed()
        pair.target.staging.gate.set()
        assert (await committing).num_blocks == 3
        assert (recorder.calls, recorder.payload) == (RECEIVED, b"first")
        assert pair.landed()


@each_way
async def test_the_report_counts_staging_on_both_sides(recorder: Recorder, way: str) -> None:
    async with staged(way) as pair:
        pair.source.staging.on_copied = lambda: pair.clock.advance_s(3.0)
        pair.target.staging.on_copied = lambda: pair.clock.advance_s(2.0)
        assert (await pair.hand_over(recorder)).seconds == 5.0


@each_way
async def test_a_copy_into_the_pool_that_fails_fails_the_hand_off_on_both_sides(recorder: Recorder, way: str) -> None:
    async with staged(way) as pair:
        pair.target.staging.error = TransferError("the device is gone")
        with pytest.raises(TransferError, match="the device is gone"):
            await pair.hand_over(recorder)
        await recorder.until("writer_stopped")
        assert recorder.calls == FAILED
        assert recorder.error is pair.target.staging.error


@each_way
async def test_a_copy_out_of_the_pool_that_fails_pushes_nothing(recorder: Recorder, way: str) -> None:
    async with staged(way) as pair:
        pair.source.staging.error = TransferError("the device is gone")
        handoff = await pair.begin(recorder)
        with pytest.raises(TransferError, match="the device is gone"):
            await handoff.push(0, SOURCES)
        with pytest.raises(TransferError, match="0 of 3 blocks"):
            await handoff.commit(b"")
        assert recorder.calls == FAILED


@each_way
async def test_blocks_withdrawn_under_a_copy_into_them_wait_for_its_end(recorder: Recorder, way: str) -> None:
    async with staged(way) as pair:
        pair.target.staging.gate.clear()
        offer = pair.offer(recorder)
        pushing = asyncio.create_task((await pair.open(offer)).push(0, SOURCES))
        await begun(pair)
        pair.receiver.withdraw(offer.transfer_id)
        await asyncio.wait({pushing}, timeout=0.2)  # the sender has heard of it, and has let go
        assert recorder.calls == FAILED[:2]
        assert pair.receiver.num_live == 1
        pair.target.staging.gate.set()
        await recorder.until("writer_stopped")
        await asyncio.gather(pushing, return_exceptions=True)
        assert pair.receiver.num_live == 0


@each_way
async def test_a_peer_lost_under_a_copy_frees_its_blocks_only_when_the_copy_has_ended(
    recorder: Recorder, way: str
) -> None:
    async with staged(way) as pair:
        pair.target.staging.gate.clear()
        await (await pair.begin(recorder)).push(0, SOURCES)
        await begun(pair)
        await pair.sender.stop()
        assert recorder.calls == ["receiving"]
        pair.target.staging.gate.set()
        await recorder.until("writer_stopped")
        assert recorder.calls == FAILED


async def test_stop_returns_only_when_a_copy_has_ended(recorder: Recorder) -> None:
    async with staged("tcp", Timing(lease_s=1.5, reply_s=2.0, stop_s=0.05)) as pair:
        pair.target.staging.gate.clear()
        await (await pair.begin(recorder)).push(0, SOURCES)
        await begun(pair)
        stopping = asyncio.create_task(pair.receiver.stop())
        assert await held_back(stopping, 0.3)
        assert recorder.calls == FAILED[:2]
        pair.target.staging.gate.set()
        await stopping
        assert recorder.calls == FAILED


@each_way
async def test_abort_waits_for_a_copy_out_whose_push_was_cancelled(recorder: Recorder, way: str) -> None:
    async with staged(way) as pair:
        pair.source.staging.gate.clear()
        handoff = await pair.begin(recorder)
        pushing = asyncio.create_task(push_and_commit(handoff))
        await asyncio.wait_for(pair.source.staging.begun.wait(), PATIENCE_S)
        pushing.cancel()
        aborting = asyncio.create_task(handoff.abort())
        assert await held_back(aborting, 0.1)
        pair.source.staging.gate.set()
        await aborting
        await recorder.until("writer_stopped")
