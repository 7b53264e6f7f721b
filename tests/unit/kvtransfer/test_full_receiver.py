"""Who has to go when more senders are connected than there is room for."""

from contextlib import AsyncExitStack

import pytest

import kvtransfer.receiver as receiver_module
from kvtransfer.frame import FrameType
from kvtransfer.sender import KvSender
from kvtransfer.transports import shm
from tandem.errors import PeerLost, TransferError
from tests.kv_ends import PATIENT, RECEIVED, Recorder, paired, push_and_commit, until
from tests.manual_clock import ManualClock
from tests.raw_sender import raw
from tests.transports import PRINTS


@pytest.fixture(autouse=True)
def room_for_two(monkeypatch):
    monkeypatch.setattr(receiver_module, "MAX_SESSIONS", 2)


@pytest.fixture
async def newcomer(make_pool):
    sender = KvSender(make_pool().memory, PRINTS, ManualClock(), "tcp", timing=PATIENT)
    yield sender
    await sender.stop()


async def _hand_over(pair, sender=None, block_ids=(3, 1, 2)):
    offer = pair.offer(Recorder(), block_ids)
    await push_and_commit(await (sender or pair.sender).open(offer.ticket, offer.endpoint, 5.0))


async def _hung_up(sender):
    """Returns once the sender has noticed that its only connection has ended."""
    (dialing,) = sender._links.values()
    await until(lambda: not dialing.result().is_open)


async def test_strangers_without_a_ticket_keep_nobody_out():
    async with paired("tcp") as pair, AsyncExitStack() as stack:
        offer = pair.offer(Recorder(), (5,))
        first, second = [await stack.enter_async_context(raw(offer, "tcp")) for _ in range(2)]

        await _hand_over(pair)

        with pytest.raises(PeerLost):
            await first.hear()
        assert (await second.ask(FrameType.ABORT, 1)).type is FrameType.DRAINED


async def test_who_has_shown_a_ticket_stays_longer_than_who_has_not(newcomer):
    async with paired("tcp") as pair:
        await _hand_over(pair)
        async with raw(pair.offer(Recorder(), (5,)), "tcp") as stranger:
            await _hand_over(pair, newcomer)
            with pytest.raises(PeerLost):
                await stranger.hear()
        (dialing,) = pair.sender._links.values()
        assert dialing.result().is_open


async def test_the_sender_that_was_idle_longest_goes_and_dials_again_for_its_next_hand_off(newcomer, make_pool):
    async with paired("tcp") as pair:
        third = KvSender(make_pool().memory, PRINTS, ManualClock(), "tcp", timing=PATIENT)
        for sender in (pair.sender, newcomer, pair.sender, third):
            await _hand_over(pair, sender)
        await _hung_up(newcomer)

        await _hand_over(pair, newcomer)

        await _hung_up(pair.sender)
        await third.stop()


async def test_open_transfers_are_never_cut_short_for_a_newcomer(newcomer):
    async with paired("tcp") as pair:
        running = Recorder()
        handoff = await pair.begin(running)
        offer = pair.offer(Recorder(), (5,))
        async with raw(offer, "tcp") as peer:
            await peer.open(offer)
            with pytest.raises(TransferError):
                await _hand_over(pair, newcomer, (7, 8, 9))
            assert (await peer.ask(FrameType.ABORT, 1)).type is FrameType.DRAINED
        await push_and_commit(handoff)
        assert running.calls == RECEIVED


@pytest.mark.parametrize("error", [OSError("no memory"), RuntimeError("a bug in a transport")])
async def test_a_connection_that_cannot_be_set_up_leaves_nothing_of_its_lane_and_the_endpoint_open(monkeypatch, error):
    def fail(*_):
        raise error

    async with paired("shm") as pair:
        closed = []
        close = shm._ReceivingLane.close
        monkeypatch.setattr(shm._ReceivingLane, "close", lambda lane: (closed.append(lane), close(lane)))
        with monkeypatch.context() as patched:
            patched.setattr(receiver_module, "Connection", fail)
            with pytest.raises(TransferError):
                await _hand_over(pair)
        assert len(closed) == 1
        await _hand_over(pair, block_ids=(7, 8, 9))
