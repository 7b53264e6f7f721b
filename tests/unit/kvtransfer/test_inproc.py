"""The in-process fake keeps the real rules and fails where it is told to."""

import asyncio

import pytest

from kvtransfer.base import BlockRef, Fingerprints
from tandem.errors import ChecksumMismatch, HandshakeMismatch, PeerLost, TransferError
from tests.inproc_transport import Faults, InprocNetwork, InprocReceiver, InprocSender
from tests.manual_clock import ManualClock

BLOCKS = (BlockRef(3, 1), BlockRef(1, 1))


@pytest.fixture
async def receiver(make_pool, prints, network):
    made = InprocReceiver(make_pool().memory, prints, ManualClock(), network)
    await made.start()
    yield made
    await made.stop()
    assert made.num_live == 0
    made.pool.close()


@pytest.fixture
def network():
    return InprocNetwork()


@pytest.fixture
async def open_handoff(receiver, make_pool, prints, network, recorder):
    senders = []

    async def open_handoff(faults=None):
        sender = InprocSender(make_pool().memory, prints, ManualClock(), network, faults)
        senders.append(sender)
        offer = receiver.offer(BLOCKS, recorder, 5.0)
        return offer, await sender.open(offer.ticket, offer.endpoint, 1.0)

    yield open_handoff
    for sender in senders:
        await sender.stop()
        sender._pool.close()


async def test_blocks_arrive(open_handoff, recorder):
    _, handoff = await open_handoff()
    await handoff.push(1, (5,))
    await handoff.push(0, (4,))
    report = await handoff.commit(b"first")
    assert (report.num_blocks, recorder.payload) == (2, b"first")
    assert recorder.calls == ["receiving", "committed"]


async def test_dropped_pushes_fail_the_commit(open_handoff, recorder):
    _, handoff = await open_handoff(Faults(drop_pushes=True))
    await handoff.push(0, (4, 5))
    with pytest.raises(TransferError, match="0 of 2 blocks"):
        await handoff.commit(b"")
    assert recorder.calls == ["receiving", "failed", "writer_stopped"]


async def test_a_corrupted_block_fails_the_push(open_handoff, recorder):
    _, handoff = await open_handoff(Faults(corrupt_position=1))
    with pytest.raises(ChecksumMismatch):
        await handoff.push(0, (4, 5))
    assert recorder.calls == ["receiving", "failed", "writer_stopped"]


async def test_a_sender_that_dies_fails_the_offer(open_handoff, recorder):
    _, handoff = await open_handoff(Faults(die_after_pushes=1))
    await handoff.push(0, (4,))
    with pytest.raises(PeerLost):
        await handoff.push(1, (5,))
    assert recorder.calls == ["receiving", "failed", "writer_stopped"]


async def test_blocks_withdrawn_under_a_delayed_push_wait_for_it(open_handoff, recorder, receiver):
    gate = asyncio.Event()
    offer, handoff = await open_handoff(Faults(gate=gate))
    pushing = asyncio.create_task(handoff.push(0, (4, 5)))
    await asyncio.sleep(0)
    receiver.withdraw(offer.transfer_id)
    assert recorder.calls == ["receiving", "failed"]
    gate.set()
    with pytest.raises(TransferError, match="withdrew"):
        await pushing
    assert recorder.calls == ["receiving", "failed", "writer_stopped"]


async def test_it_can_refuse_to_open(open_handoff, recorder):
    with pytest.raises(PeerLost, match="told to"):
        await open_handoff(Faults(refuse_open=PeerLost("told to")))
    assert recorder.calls == []


async def test_a_stopped_receiver_is_unreachable(open_handoff, receiver):
    await receiver.stop()
    with pytest.raises(PeerLost, match="cannot connect"):
        await open_handoff()


async def test_fingerprints_are_compared(receiver, make_pool, prints, network, recorder):
    sender = InprocSender(make_pool().memory, Fingerprints("model-b", prints.layout), ManualClock(), network)
    offer = receiver.offer(BLOCKS, recorder, 5.0)
    with pytest.raises(HandshakeMismatch, match="model differs"):
        await sender.open(offer.ticket, offer.endpoint, 1.0)
    sender._pool.close()
