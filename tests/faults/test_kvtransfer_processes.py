"""A hand-off whose other side is a real process that is killed, stopped or rude."""

import signal
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from shell.clock import MonotonicClock
from tandem.errors import PeerLost, TransferError
from tests.faults.kv_peer import warm_up
from tests.faults.kv_peer_process import PATIENT, half_peer
from tests.kv_ends import FAILED, Recorder, refs_of
from tests.nixl_param import NIXL, needs_nixl
from tests.transports import PRINTS, SharedPool

PATIENCE_S = 40.0
TRANSPORTS = ["shm", "tcp", NIXL]
"""Those that `kv_peer_process` can catch within a block; at all other points: test_kv_fault_matrix."""


@asynccontextmanager
async def running(role, transport):
    warm_up()
    peer = half_peer(role, transport)
    try:
        yield peer
    finally:
        peer.close()


@pytest.fixture
def memory():
    pool = SharedPool()
    pool.blocks.zero_()
    yield pool.memory
    pool.close()


@asynccontextmanager
async def caught_in_the_middle(memory, transport, role="sending"):
    """A receiver here, and a sender process that has written half of block 3."""
    receiver = KvReceiver(memory, PRINTS, MonotonicClock(), (transport,), "127.0.0.1", timing=PATIENT)
    await receiver.start()
    listener = Recorder(patience_s=PATIENCE_S)
    try:
        async with running(role, transport) as peer:
            offer = receiver.offer(refs_of((3, 1)), listener, PATIENCE_S)
            peer.tell(offer.ticket, offer.endpoint)
            assert await peer.hear() == "half written"
            yield receiver, listener, peer, offer
    finally:
        await receiver.stop()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_sender_killed_in_the_middle_of_a_block_frees_it(memory, transport):
    async with caught_in_the_middle(memory, transport) as (receiver, listener, peer, _):
        assert listener.calls == ["receiving"]
        peer.signal(signal.SIGKILL)
        await listener.until("writer_stopped")
        assert listener.calls == FAILED
        assert isinstance(listener.error, PeerLost)
        assert receiver.num_live == 0
        assert bytes(memory.blocks[3].tolist())[128:] == bytes(128)


async def test_a_stopped_sender_that_wakes_finishes_its_copy_and_lets_go(memory, leases):
    async with caught_in_the_middle(memory, "shm") as (receiver, listener, peer, _):
        peer.signal(signal.SIGSTOP)
        leases.shorten()
        await listener.until("failed")
        peer.signal(signal.SIGCONT)
        peer.tell()
        assert (await peer.hear()).startswith("push ended")
        await listener.until("writer_stopped")
        assert receiver.num_live == 0


async def test_a_dropped_socket_of_a_living_process_proves_nothing(memory):
    async with caught_in_the_middle(memory, "shm", "rude") as (receiver, listener, peer, _):
        peer.tell()
        assert await peer.hear() == "dropped"
        await listener.until("failed")
        assert receiver.num_live == 1
        peer.signal(signal.SIGKILL)
        await listener.until("writer_stopped")
        assert receiver.num_live == 0


@needs_nixl
async def test_what_a_living_process_still_writes_over_nixl_goes_nowhere_once_its_link_has_ended(memory):
    async with caught_in_the_middle(memory, "nixl", "rude") as (receiver, listener, peer, _):
        assert bytes(memory.blocks[3].tolist()) == b"\xab" * 128 + bytes(128)
        peer.tell()
        assert await peer.hear() == "dropped"
        await listener.until("writer_stopped")
        assert listener.calls == FAILED
        assert receiver.num_live == 0
        memory.blocks[3] = 0x11  # another request's by now
        peer.tell()
        assert "push ended" in await peer.hear()
        assert bytes(memory.blocks[3].tolist()) == b"\x11" * 256


@pytest.mark.parametrize("transport", ["shm", "tcp"])  # over nixl it may have ended the sender's access by then
async def test_receiver_stop_does_not_claim_that_a_stopped_sender_let_go(memory, transport):
    async with caught_in_the_middle(memory, transport) as (receiver, listener, peer, _):
        peer.signal(signal.SIGSTOP)
        await receiver.stop()
        assert "failed" in listener.calls
        assert ("writer_stopped" in listener.calls) == (transport == "tcp")


@asynccontextmanager
async def sending_to(memory, transport):
    sender = KvSender(memory, PRINTS, MonotonicClock(), transport, timing=PATIENT)
    try:
        yield sender
    finally:
        await sender.stop()


def _peer_mappings():
    """Besides this process's own pool."""
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:test-pool") - 1


async def _open(sender, peer):
    ticket, endpoint = await peer.hear()
    handoff = await sender.open(ticket, endpoint, PATIENCE_S)
    assert await peer.hear() == "receiving"
    return handoff


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_restarted_receiver_is_served_and_the_old_mapping_is_gone(memory, transport):
    async with sending_to(memory, transport) as sender:
        async with running("receiving", transport) as old:
            lost = await _open(sender, old)
            old.signal(signal.SIGKILL)
            await old.ended()
            with pytest.raises(TransferError):
                await lost.commit(b"")
        async with running("receiving", transport) as new:
            handoff = await _open(sender, new)
            assert _peer_mappings() == (1 if transport == "shm" else 0)
            await handoff.push(0, (0, 1))
            await handoff.commit(b"\x2a")
            assert await new.hear() == "committed 2a"
