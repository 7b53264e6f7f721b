"""Whole hand-offs over real sockets, in one process."""

import asyncio
from contextlib import AsyncExitStack

import pytest
import uvloop

from tandem.errors import PeerLost, TransferError
from tests import held
from tests.kv_ends import FAILED, QUICK, RECEIVED, SOURCES, Recorder, paired, push_and_commit
from tests.transports import EVERY, PEER_WRITES, USABLE, telling


async def _hand_over(transport):
    async with paired(transport) as pair:
        listener = Recorder()
        handoff = await pair.begin(listener)
        await handoff.push(0, SOURCES[:1])
        await handoff.push(1, SOURCES[1:])
        report = await handoff.commit(b"first token")
        assert (listener.calls, listener.payload) == (RECEIVED, b"first token")
        assert pair.landed()
        assert (report.transport, report.num_blocks, report.num_bytes) == (transport, 3, 3 * 256)
        assert pair.receiver.num_live == 0


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("transport", EVERY)
def test_blocks_arrive_as_they_were_sent_on_either_loop(transport, run):
    run(_hand_over(transport))


@pytest.mark.parametrize("transport", EVERY)
async def test_many_handoffs_share_one_connection(transport):
    async with paired(transport) as pair:
        listeners = [Recorder() for _ in range(8)]
        offers = [pair.offer(each, (2 * i, 2 * i + 1)) for i, each in enumerate(listeners)]

        async def hand_over(i):
            handoff = await pair.open(offers[i])
            await handoff.push(1, (i,))
            await handoff.push(0, (15 - i,))
            await handoff.commit(bytes([i]))

        await asyncio.gather(*map(hand_over, range(8)))
        assert [each.payload for each in listeners] == [bytes([i]) for i in range(8)]
        assert all(pair.landed((15 - i, i), (2 * i, 2 * i + 1)) for i in range(8))


@pytest.mark.parametrize("transport", EVERY)
async def test_pushes_longer_than_the_credit_window_go_through(recorder, transport):
    async with paired(transport) as pair:
        ids = tuple(range(16))
        handoff = await pair.begin(recorder, ids)
        for position in reversed(ids):
            await handoff.push(position, (position,))
        await handoff.commit(b"")
        assert pair.landed(ids, ids)


@pytest.mark.parametrize("transport", EVERY)
async def test_commit_before_every_block_was_sent_fails(recorder, transport):
    async with paired(transport) as pair:
        handoff = await pair.begin(recorder)
        await handoff.push(0, (0, 1))
        with pytest.raises(TransferError, match="COMMIT after 2 of 3 blocks"):
            await handoff.commit(b"")
        assert recorder.calls == FAILED


@pytest.mark.parametrize("transport", EVERY)
async def test_a_position_is_never_pushed_twice(recorder, transport):
    async with paired(transport) as pair:
        handoff = await pair.begin(recorder)
        await handoff.push(0, SOURCES[:2])
        with pytest.raises(TransferError, match="pushed before"):
            await handoff.push(1, (7, 8))
        await handoff.push(2, SOURCES[2:])
        await handoff.commit(b"")
        assert pair.landed()


async def test_a_second_commit_returns_the_same_report(recorder):
    async with paired("shm") as pair:
        handoff = await pair.begin(recorder)
        await handoff.push(0, SOURCES)
        assert await handoff.commit(b"x") == await handoff.commit(b"y")
        await handoff.abort()
        assert recorder.calls == RECEIVED
        assert recorder.payload == b"x"


@pytest.mark.parametrize("transport", EVERY)
async def test_abort_frees_the_blocks_on_the_other_side(recorder, transport):
    async with paired(transport) as pair:
        handoff = await pair.begin(recorder)
        await handoff.push(0, (0,))
        await handoff.abort()
        await handoff.abort()
        await recorder.until("writer_stopped")
        with pytest.raises(TransferError, match="aborted"):
            await handoff.commit(b"")
        assert pair.receiver.num_live == 0


@pytest.mark.parametrize("transport", EVERY)
async def test_withdraw_stops_the_sender_and_then_frees(recorder, transport):
    async with paired(transport) as pair:
        offer = pair.offer(recorder)
        handoff = await pair.open(offer)
        await handoff.push(0, (0,))
        pair.receiver.withdraw(offer.transfer_id)
        pair.receiver.withdraw(offer.transfer_id)
        assert "failed" in recorder.calls
        await recorder.until("writer_stopped")
        with pytest.raises(TransferError, match="withdrew"):
            await handoff.commit(b"")
        assert recorder.calls == FAILED


async def test_withdrawing_an_unopened_offer_frees_at_once(recorder):
    async with paired("shm") as pair:
        offer = pair.offer(recorder)
        pair.receiver.withdraw(offer.transfer_id)
        pair.receiver.withdraw("no such transfer")
        assert recorder.calls == ["failed", "writer_stopped"]
        with pytest.raises(TransferError, match="unknown or has ended"):
            await pair.open(offer)


async def test_an_offer_that_is_never_shown_expires(recorder):
    async with paired("shm") as pair:
        pair.offer(recorder, expires_in_s=10.0)
        pair.clock.advance_s(9.9)
        pair.receiver.reap()
        assert recorder.calls == []
        pair.clock.advance_s(0.2)
        pair.receiver.reap()
        pair.receiver.reap()
        assert recorder.calls == ["failed", "writer_stopped"]


async def test_idle_handoffs_live_by_heartbeats():
    async with AsyncExitStack() as stack:
        pairs = {each: await stack.enter_async_context(paired(each, QUICK)) for each in USABLE}
        recorders = {each: Recorder() for each in USABLE}
        handoffs = {}
        for transport, pair in pairs.items():
            with telling(transport):
                handoffs[transport] = await pair.begin(recorders[transport])
        idle = asyncio.Event()
        asyncio.get_running_loop().call_later(2.5 * QUICK.lease_s, idle.set)
        await asyncio.wait_for(idle.wait(), 10)
        for transport, handoff in handoffs.items():
            with telling(transport):
                await push_and_commit(handoff)
                assert recorders[transport].calls == RECEIVED


@pytest.mark.parametrize("transport", EVERY)
async def test_a_listener_may_refuse_the_first_byte(recorder, transport):
    async with paired(transport) as pair:
        recorder.refuse_with = TransferError("no longer wanted")
        with pytest.raises(TransferError, match="no longer wanted"):
            await pair.begin(recorder)
        assert recorder.calls == FAILED


@pytest.mark.parametrize("transport", EVERY)
async def test_the_receiver_stopping_fails_what_is_open(recorder, transport):
    async with paired(transport) as pair:
        handoff = await pair.begin(recorder)
        await pair.receiver.stop()
        assert recorder.calls == FAILED
        with pytest.raises(TransferError):
            await handoff.commit(b"")


@pytest.mark.parametrize("transport", EVERY)
async def test_the_sender_stopping_releases_the_receiver(recorder, transport):
    async with paired(transport) as pair:
        handoff = await pair.begin(recorder)
        await pair.sender.stop()
        await recorder.until("writer_stopped")
        assert isinstance(recorder.error, PeerLost)
        with pytest.raises(TransferError):
            await handoff.push(0, (0,))


@pytest.mark.parametrize("transport", EVERY)
async def test_stop_leaves_no_tasks_descriptors_or_mappings(transport):
    await _hand_over(transport)  # what is opened once per process
    async with held.nothing_stays():
        for _ in range(3):
            await _hand_over(transport)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def _busy_copying(handoff):
    """As if a copy were under way on the pool's thread, until the future is set."""
    copy = asyncio.get_running_loop().create_future()
    copying = asyncio.create_task(asyncio.wait({handoff._lend(copy)}))
    await asyncio.sleep(0)
    return copy, copying


async def _another_handoff(pair):
    """A whole hand-off on the same connection: what was said before it has been heard on both sides."""
    await pair.hand_over(Recorder(), (8,))


async def test_a_sender_says_drained_only_after_its_copy_has_ended(recorder):
    async with paired("shm") as pair:
        offer = pair.offer(recorder)
        handoff = await pair.open(offer)
        copy, copying = await _busy_copying(handoff)
        pair.receiver.withdraw(offer.transfer_id)
        await _another_handoff(pair)
        assert recorder.calls == FAILED[:2]
        copy.set_result(None)
        await recorder.until("writer_stopped")
        await copying


async def test_abort_waits_for_a_copy_whose_push_was_cancelled(recorder):
    async with paired("shm") as pair:
        handoff = await pair.begin(recorder)
        copy, copying = await _busy_copying(handoff)
        copying.cancel()
        aborting = asyncio.create_task(handoff.abort())
        await _another_handoff(pair)
        assert not aborting.done()
        assert recorder.calls == ["receiving"]
        copy.set_result(None)
        await aborting
        await recorder.until("writer_stopped")


async def test_stop_unmaps_only_after_a_copy_has_ended(recorder):
    async with paired("shm") as pair:
        handoff = await pair.begin(recorder)
        copy, copying = await _busy_copying(handoff)
        stopping = asyncio.create_task(pair.sender.stop())
        with pytest.raises(TransferError):
            await handoff._until(lambda: False)
        assert recorder.calls == ["receiving"]
        assert not stopping.done()
        copy.set_result(None)
        await stopping
        await copying
        await recorder.until("writer_stopped")


@pytest.mark.parametrize("transport", PEER_WRITES)
async def test_stop_says_bye_though_a_hand_off_is_forgotten_meanwhile(transport):
    async with paired(transport) as pair:
        listeners = Recorder(), Recorder()
        offers = [pair.offer(listener, (block,)) for block, listener in enumerate(listeners)]
        handoffs = [await pair.open(offer) for offer in offers]
        copies = [await _busy_copying(handoff) for handoff in handoffs]
        pair.receiver.withdraw(offers[0].transfer_id)
        await _another_handoff(pair)  # DRAINED is due
        stopping = asyncio.create_task(pair.sender.stop())
        (dialing,) = pair.sender._links.values()
        await asyncio.wait({dialing.result()._reading})
        await asyncio.wait({stopping}, timeout=0.05)  # it waits for the copies
        for copy, copying in copies:
            copy.set_result(None)
            await copying
        await stopping
        for listener in listeners:
            await listener.until("writer_stopped")
