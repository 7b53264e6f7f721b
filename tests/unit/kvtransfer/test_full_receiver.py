"""Who has to go when more senders are connected than there is room for."""

import asyncio
from contextlib import AsyncExitStack

import pytest

import kvtransfer.receiver as receiver_module
from kvtransfer.frame import FrameType
from kvtransfer.sender import KvSender
from kvtransfer.transports import shm
from tandem.errors import PeerLost, TransferError
from tests.manual_clock import ManualClock


@pytest.fixture(autouse=True)
def room_for_two(monkeypatch):
    monkeypatch.setattr(receiver_module, "MAX_SESSIONS", 2)


@pytest.fixture
async def newcomer(make_pool, prints, patient):
    sender = KvSender(make_pool().memory, prints, ManualClock(), "tcp", timing=patient)
    yield sender
    await sender.stop()


async def _hand_over(pair, sender, listener, block_ids=(3, 1, 2)):
    offer = pair.offer(listener, block_ids)
    handoff = await sender.open(offer.ticket, offer.endpoint, 5.0)
    await handoff.push(0, (0, 1, 2))
    await handoff.commit(b"")


async def _hung_up(sender):
    """Returns once the sender has noticed that its only connection has ended."""
    (dialing,) = sender._links.values()
    async with asyncio.timeout(30):
        while dialing.result().is_open:  # noqa: ASYNC110  a link tells nobody
            await asyncio.sleep(0)


async def test_strangers_without_a_ticket_keep_nobody_out(paired, raw, make_recorder):
    async with paired("tcp") as pair, AsyncExitStack() as stack:
        offer = pair.offer(make_recorder(), (5,))
        first, second = [await stack.enter_async_context(raw(offer, "tcp")) for _ in range(2)]

        await _hand_over(pair, pair.sender, make_recorder())

        with pytest.raises(PeerLost):
            await first.hear()
        assert (await second.ask(FrameType.ABORT, 1)).type is FrameType.DRAINED


async def test_who_has_shown_a_ticket_stays_longer_than_who_has_not(paired, raw, newcomer, make_recorder):
    async with paired("tcp") as pair:
        await _hand_over(pair, pair.sender, make_recorder())
        async with raw(pair.offer(make_recorder(), (5,)), "tcp") as stranger:
            await _hand_over(pair, newcomer, make_recorder())
            with pytest.raises(PeerLost):
                await stranger.hear()
        (dialing,) = pair.sender._links.values()
        assert dialing.result().is_open


async def test_the_sender_that_was_idle_longest_goes_and_dials_again_for_its_next_hand_off(
    paired, newcomer, make_pool, prints, patient, make_recorder
):
    async with paired("tcp") as pair:
        third = KvSender(make_pool().memory, prints, ManualClock(), "tcp", timing=patient)
        for sender in (pair.sender, newcomer, pair.sender, third):
            await _hand_over(pair, sender, make_recorder())
        await _hung_up(newcomer)

        await _hand_over(pair, newcomer, make_recorder())

        await _hung_up(pair.sender)
        await third.stop()


async def test_open_transfers_are_never_cut_short_for_a_newcomer(paired, raw, newcomer, make_recorder):
    async with paired("tcp") as pair:
        running = make_recorder()
        handoff = await pair.open(pair.offer(running))
        offer = pair.offer(make_recorder(), (5,))
        async with raw(offer, "tcp") as peer:
            await peer.open(offer)
            with pytest.raises(TransferError):
                await _hand_over(pair, newcomer, make_recorder(), (7, 8, 9))
            assert (await peer.ask(FrameType.ABORT, 1)).type is FrameType.DRAINED
        await handoff.push(0, (0, 1, 2))
        await handoff.commit(b"")
        assert running.calls == ["receiving", "committed"]


async def test_a_connection_that_cannot_be_set_up_leaves_nothing_of_its_lane(paired, make_recorder, monkeypatch):
    def fail(*_):
        raise OSError("no memory")

    async with paired("shm") as pair:
        closed = []
        close = shm._ReceivingLane.close
        monkeypatch.setattr(shm._ReceivingLane, "close", lambda lane: (closed.append(lane), close(lane)))
        with monkeypatch.context() as patched:
            patched.setattr(receiver_module, "Connection", fail)
            with pytest.raises(TransferError):
                await _hand_over(pair, pair.sender, make_recorder())
        assert len(closed) == 1
        await _hand_over(pair, pair.sender, make_recorder(), (7, 8, 9))
