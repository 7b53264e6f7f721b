"""Whole hand-offs over real sockets, in one process."""

import asyncio
from contextlib import AsyncExitStack

import pytest
import uvloop

from tandem.errors import PeerLost, TransferError
from tests import held
from tests.transports import EVERY, PEER_WRITES, USABLE, telling


async def _hand_over(paired, make_recorder, transport):
    async with paired(transport) as pair:
        listener = make_recorder()
        handoff = await pair.open(pair.offer(listener, (3, 1, 2)))
        await handoff.push(0, (9,))
        await handoff.push(1, (4, 5))
        report = await handoff.commit(b"first token")
        assert listener.calls == ["receiving", "committed"]
        assert listener.payload == b"first token"
        assert pair.landed((9, 4, 5), (3, 1, 2))
        assert (report.num_blocks, report.num_bytes) == (3, 3 * 256)
        assert pair.receiver.num_live == 0
        return report.transport


@pytest.mark.parametrize("transport", EVERY)
async def test_blocks_arrive_as_they_were_sent(paired, make_recorder, transport):
    assert await _hand_over(paired, make_recorder, transport) == transport


@pytest.mark.parametrize("transport", EVERY)
def test_it_runs_on_uvloop(paired, make_recorder, transport):
    assert uvloop.run(_hand_over(paired, make_recorder, transport)) == transport


async def test_auto_takes_shared_memory_on_one_machine(paired, make_recorder):
    assert await _hand_over(paired, make_recorder, "auto") == "shm"


async def test_auto_falls_back_to_tcp_when_the_unix_socket_is_unreachable(paired, recorder):
    async with paired("auto") as pair:
        offer = pair.offer(recorder)
        endpoint = offer.endpoint.replace(b"shm.unix_name=tandem-kv-", b"shm.unix_name=gone-")
        handoff = await pair.sender.open(offer.ticket, endpoint, 5.0)
        await handoff.push(0, (0, 1, 2))
        assert (await handoff.commit(b"")).transport == "tcp"


async def test_auto_takes_tcp_between_machines(paired, recorder):
    async with paired("auto") as pair:
        offer = pair.offer(recorder)
        endpoint = b"\n".join(
            b"shm.boot_id=another" if line.startswith(b"shm.boot_id=") else line for line in offer.endpoint.split(b"\n")
        )
        handoff = await pair.sender.open(offer.ticket, endpoint, 5.0)
        await handoff.push(0, (0, 1, 2))
        assert (await handoff.commit(b"")).transport == "tcp"


async def test_a_fixed_transport_that_the_peer_lacks_is_a_clear_error(paired, recorder):
    async with paired("shm", offered=("tcp",)) as pair:
        with pytest.raises(TransferError, match="transport shm is not offered by the peer, which has tcp"):
            await pair.open(pair.offer(recorder))


@pytest.mark.parametrize("transport", EVERY)
async def test_many_handoffs_share_one_connection(paired, make_recorder, transport):
    async with paired(transport) as pair:
        listeners = [make_recorder() for _ in range(8)]
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
async def test_pushes_longer_than_the_credit_window_go_through(paired, recorder, transport):
    async with paired(transport) as pair:
        ids = tuple(range(16))
        handoff = await pair.open(pair.offer(recorder, ids))
        for position in reversed(ids):
            await handoff.push(position, (position,))
        await handoff.commit(b"")
        assert pair.landed(ids, ids)


@pytest.mark.parametrize("transport", EVERY)
async def test_commit_before_every_block_was_sent_fails(paired, recorder, transport):
    async with paired(transport) as pair:
        handoff = await pair.open(pair.offer(recorder))
        await handoff.push(0, (0, 1))
        with pytest.raises(TransferError, match="COMMIT after 2 of 3 blocks"):
            await handoff.commit(b"")
        assert recorder.calls == ["receiving", "failed", "writer_stopped"]


@pytest.mark.parametrize("transport", EVERY)
async def test_a_position_is_never_pushed_twice(paired, recorder, transport):
    async with paired(transport) as pair:
        handoff = await pair.open(pair.offer(recorder))
        await handoff.push(0, (0, 1, 2))
        with pytest.raises(TransferError, match="pushed before"):
            await handoff.push(1, (5,))
        await handoff.commit(b"")
        assert pair.landed((0, 1, 2), (3, 1, 2))


async def test_blocks_outside_offer_or_pool_are_never_pushed(paired, recorder):
    async with paired("shm") as pair:
        handoff = await pair.open(pair.offer(recorder))
        for first, sources in ((2, (0, 1)), (-1, (0,)), (0, (16,)), (0, (-1,))):
            with pytest.raises(TransferError, match="leave the"):
                await handoff.push(first, sources)


async def test_a_second_commit_returns_the_same_report(paired, recorder):
    async with paired("shm") as pair:
        handoff = await pair.open(pair.offer(recorder))
        await handoff.push(0, (0, 1, 2))
        assert await handoff.commit(b"x") == await handoff.commit(b"y")
        await handoff.abort()
        assert recorder.calls == ["receiving", "committed"]
        assert recorder.payload == b"x"


@pytest.mark.parametrize("transport", EVERY)
async def test_abort_frees_the_blocks_on_the_other_side(paired, recorder, transport):
    async with paired(transport) as pair:
        handoff = await pair.open(pair.offer(recorder))
        await handoff.push(0, (0,))
        await handoff.abort()
        await handoff.abort()
        await recorder.until("writer_stopped")
        with pytest.raises(TransferError, match="aborted"):
            await handoff.commit(b"")
        assert pair.receiver.num_live == 0


@pytest.mark.parametrize("transport", EVERY)
async def test_withdraw_stops_the_sender_and_then_frees(paired, recorder, transport):
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
        assert recorder.calls == ["receiving", "failed", "writer_stopped"]


async def test_withdrawing_an_unopened_offer_frees_at_once(paired, recorder):
    async with paired("shm") as pair:
        offer = pair.offer(recorder)
        pair.receiver.withdraw(offer.transfer_id)
        pair.receiver.withdraw("no such transfer")
        assert recorder.calls == ["failed", "writer_stopped"]
        with pytest.raises(TransferError, match="unknown or has ended"):
            await pair.open(offer)


async def test_an_offer_that_is_never_shown_expires(paired, recorder):
    async with paired("shm") as pair:
        pair.offer(recorder, expires_in_s=10.0)
        pair.clock.advance_s(9.9)
        pair.receiver.reap()
        assert recorder.calls == []
        pair.clock.advance_s(0.2)
        pair.receiver.reap()
        pair.receiver.reap()
        assert recorder.calls == ["failed", "writer_stopped"]


async def test_idle_handoffs_live_by_heartbeats(paired, make_recorder, quick):
    async with AsyncExitStack() as stack:
        pairs = {each: await stack.enter_async_context(paired(each, quick)) for each in USABLE}
        recorders = {each: make_recorder() for each in USABLE}
        handoffs = {}
        for transport, pair in pairs.items():
            with telling(transport):
                handoffs[transport] = await pair.open(pair.offer(recorders[transport]))
        idle = asyncio.Event()
        asyncio.get_running_loop().call_later(2.5 * quick.lease_s, idle.set)
        await asyncio.wait_for(idle.wait(), 10)
        for transport, handoff in handoffs.items():
            with telling(transport):
                await handoff.push(0, (0, 1, 2))
                await handoff.commit(b"")
                assert recorders[transport].calls == ["receiving", "committed"]


@pytest.mark.parametrize("transport", EVERY)
async def test_a_listener_may_refuse_the_first_byte(paired, recorder, transport):
    async with paired(transport) as pair:
        recorder.refuse_with = TransferError("no longer wanted")
        with pytest.raises(TransferError, match="no longer wanted"):
            await pair.open(pair.offer(recorder))
        assert recorder.calls == ["receiving", "failed", "writer_stopped"]


@pytest.mark.parametrize("transport", EVERY)
async def test_the_receiver_stopping_fails_what_is_open(paired, recorder, transport):
    async with paired(transport) as pair:
        handoff = await pair.open(pair.offer(recorder))
        await pair.receiver.stop()
        assert recorder.calls == ["receiving", "failed", "writer_stopped"]
        with pytest.raises(TransferError):
            await handoff.commit(b"")


@pytest.mark.parametrize("transport", EVERY)
async def test_the_sender_stopping_releases_the_receiver(paired, recorder, transport):
    async with paired(transport) as pair:
        handoff = await pair.open(pair.offer(recorder))
        await pair.sender.stop()
        await recorder.until("writer_stopped")
        assert isinstance(recorder.error, PeerLost)
        with pytest.raises(TransferError):
            await handoff.push(0, (0,))


@pytest.mark.parametrize("transport", EVERY)
async def test_stop_leaves_no_tasks_descriptors_or_mappings(paired, make_recorder, transport):
    await _hand_over(paired, make_recorder, transport)  # what is opened once per process
    async with held.nothing_stays():
        for _ in range(3):
            await _hand_over(paired, make_recorder, transport)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def _busy_copying(handoff):
    """As if a copy were under way on the pool's thread, until the future is set."""
    copy = asyncio.get_running_loop().create_future()
    copying = asyncio.create_task(asyncio.wait({handoff._lend(copy)}))
    await asyncio.sleep(0)
    return copy, copying


async def _another_handoff(pair, listener):
    """A whole hand-off on the same connection: what was said before it has been heard on both sides."""
    handoff = await pair.open(pair.offer(listener, (8,)))
    await handoff.push(0, (8,))
    await handoff.commit(b"")


async def test_a_sender_says_drained_only_after_its_copy_has_ended(paired, make_recorder):
    async with paired("shm") as pair:
        listener = make_recorder()
        offer = pair.offer(listener)
        handoff = await pair.open(offer)
        copy, copying = await _busy_copying(handoff)
        pair.receiver.withdraw(offer.transfer_id)
        await _another_handoff(pair, make_recorder())
        assert listener.calls == ["receiving", "failed"]
        copy.set_result(None)
        await listener.until("writer_stopped")
        await copying


async def test_abort_waits_for_a_copy_whose_push_was_cancelled(paired, make_recorder):
    async with paired("shm") as pair:
        listener = make_recorder()
        handoff = await pair.open(pair.offer(listener))
        copy, copying = await _busy_copying(handoff)
        copying.cancel()
        aborting = asyncio.create_task(handoff.abort())
        await _another_handoff(pair, make_recorder())
        assert not aborting.done()
        assert listener.calls == ["receiving"]
        copy.set_result(None)
        await aborting
        await listener.until("writer_stopped")


async def test_stop_unmaps_only_after_a_copy_has_ended(paired, make_recorder):
    async with paired("shm") as pair:
        listener = make_recorder()
        handoff = await pair.open(pair.offer(listener))
        copy, copying = await _busy_copying(handoff)
        stopping = asyncio.create_task(pair.sender.stop())
        with pytest.raises(TransferError):
            await handoff._until(lambda: False)
        assert listener.calls == ["receiving"]
        assert not stopping.done()
        copy.set_result(None)
        await stopping
        await copying
        await listener.until("writer_stopped")


@pytest.mark.parametrize("transport", PEER_WRITES)
async def test_stop_says_bye_though_a_hand_off_is_forgotten_meanwhile(paired, make_recorder, transport):
    async with paired(transport) as pair:
        listeners = make_recorder(), make_recorder()
        offers = [pair.offer(listener, (block,)) for block, listener in enumerate(listeners)]
        handoffs = [await pair.open(offer) for offer in offers]
        copies = [await _busy_copying(handoff) for handoff in handoffs]
        pair.receiver.withdraw(offers[0].transfer_id)
        await _another_handoff(pair, make_recorder())  # DRAINED is due
        stopping = asyncio.create_task(pair.sender.stop())
        await asyncio.wait({handoffs[0]._sink._reading})
        await asyncio.wait({stopping}, timeout=0.05)  # it waits for the copies
        for copy, copying in copies:
            copy.set_result(None)
            await copying
        await stopping
        for listener in listeners:
            await listener.until("writer_stopped")
