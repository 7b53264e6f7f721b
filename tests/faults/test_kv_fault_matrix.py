"""Either side of a hand-off dies or stands still at any point, over every transport; what is beside it goes on."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from kvtransfer.base import Offer
from kvtransfer.timing import Timing
from shell.clock import MonotonicClock
from tandem.errors import TransferError
from tests import held
from tests.faults.kv_peer import FILL, PATIENCE_S, PAYLOAD, RECEIVER_POINTS, SENDER_POINTS, TARGETS, Peer, peers
from tests.faults.leases import Leases, Lively
from tests.kv_ends import FAILED, RECEIVED, Pair, Recorder, ends, push_and_commit
from tests.transports import EVERY_AND_RINGS, TestPool, make_pool, transport_of, way_of

DYING = Timing(lease_s=30.0, reply_s=30.0, stop_s=1.0)
"""No silence is noticed: a death is seen as such."""
HOME = Lively(lease_s=10.0, reply_s=30.0, stop_s=1.0)
"""Where leases are shortened once every peer stands still; who dials one that stands waits for a whole lease."""
NUM_BLOCKS = 32
BESIDE = (30, 31)
"""Blocks of the hand-off that nothing happens to."""
AFTER_COMMIT = ("committing", "committed")


def listening() -> Recorder:
    return Recorder(patience_s=PATIENCE_S)


@asynccontextmanager
async def at_home(transport: str, timing: Timing) -> AsyncIterator[Pair]:
    """Both ends in this process; peers are on the other end of either. A hand-off within it is open all the while, and
    ends well.
    """
    source, pool = (make_pool(transport, NUM_BLOCKS) for _ in range(2))
    name = transport_of(transport)
    async with ends(source, pool, name, (name,), timing, clock=MonotonicClock()) as home:
        beside = listening()
        handoff = await home.begin(beside, BESIDE)
        await handoff.push(0, BESIDE[:1])
        yield home
        await handoff.push(1, BESIDE[1:])
        await handoff.commit(b"")
        assert beside.calls == RECEIVED
        assert home.landed(BESIDE, BESIDE)
        assert home.receiver.num_live == 0


@pytest.fixture
async def nothing_stays(transport: str) -> AsyncIterator[None]:
    async with at_home(transport, DYING):  # what is opened once per process
        with peers("send", transport, (), DYING):
            pass
    async with held.nothing_stays():
        yield
    assert asyncio.all_tasks() == {asyncio.current_task()}


@asynccontextmanager
async def senders(home: Pair, transport: str, timing: Timing) -> AsyncIterator[list[tuple[Peer, Recorder, list[int]]]]:
    """One sending process per point, at its point, with the listener and the blocks of its offer."""
    with peers("send", transport, SENDER_POINTS, timing) as started:
        caught = []
        for index, peer in enumerate(started):
            blocks, listener = [2 * index, 2 * index + 1], listening()
            offer = home.offer(listener, blocks)
            peer.tell(offer.ticket, offer.endpoint)
            caught.append((peer, listener, blocks, offer))
        for peer, *_ in caught:
            await peer.reaches_its_point()
        yield [(peer, listener, blocks) for peer, listener, blocks, _ in caught]
        for peer, listener, _, offer in caught:
            if peer.point == "connected":  # nobody has shown it: it is as good as ever
                assert listener.calls == []
                await push_and_commit(await home.open(offer), (0, 1))
                assert listener.calls == RECEIVED


@pytest.mark.usefixtures("nothing_stays")
@pytest.mark.parametrize("transport", EVERY_AND_RINGS)
async def test_a_sender_that_dies_at_any_point_frees_its_blocks_and_harms_nobody(transport: str) -> None:
    async with at_home(transport, DYING) as home, senders(home, transport, DYING) as caught:
        for peer, listener, _ in caught:
            assert "failed" not in listener.calls, peer.point
            peer.signal(signal.SIGKILL)
        for peer, listener, blocks in caught:
            if peer.point in AFTER_COMMIT:
                await listener.until("committed")
                assert listener.calls == RECEIVED, peer.point
                assert (home.target.blocks[blocks] == FILL).all(), peer.point
            elif peer.point != "connected":
                await listener.until("writer_stopped")
                assert listener.calls == FAILED, peer.point


def sent_from(home: Pair) -> bytes:
    """What `hand_over` brings to a receiving process."""
    return bytes(home.source.blocks[: len(TARGETS)].flatten().tolist())


async def hand_over(home: Pair, offer: Offer) -> str:
    """How a hand-off to a receiving process ended; empty = well."""
    try:
        handoff = await home.open(offer)
        try:
            for position in range(len(TARGETS)):
                await handoff.push(position, (position,))
            await handoff.commit(PAYLOAD)
        finally:
            await handoff.abort()
    except TransferError as error:
        return str(error)
    return ""


@asynccontextmanager
async def receivers(home: Pair, transport: str, timing: Timing) -> AsyncIterator[list[tuple[Peer, asyncio.Task[str]]]]:
    """One receiving process per point, at its point, with the hand-off to it that is under way."""
    with peers("receive", transport, RECEIVER_POINTS, timing) as started:
        caught = [(peer, asyncio.create_task(hand_over(home, await peer.hear()))) for peer in started]
        for peer, handing_over in caught:
            if peer.point == "committed":
                assert await asyncio.wait_for(handing_over, PATIENCE_S) == ""
                peer.tell("it was heard")
            await peer.reaches_its_point()
        yield caught


async def outcome(handing_over: asyncio.Task[str]) -> str:
    return await asyncio.wait_for(asyncio.shield(handing_over), PATIENCE_S)


@pytest.mark.usefixtures("nothing_stays")
@pytest.mark.parametrize("transport", EVERY_AND_RINGS)
async def test_a_receiver_that_dies_at_any_point_fails_its_own_hand_off_and_its_successor_is_served(
    transport: str,
) -> None:
    async with at_home(transport, DYING) as home, receivers(home, transport, DYING) as caught:
        for peer, handing_over in caught:
            assert handing_over.done() is (peer.point == "committed"), peer.point
            peer.signal(signal.SIGKILL)
        for peer, handing_over in caught:
            assert bool(await outcome(handing_over)) is (peer.point != "committed"), peer.point
        with peers("receive", transport, ("nowhere",), DYING) as (successor,):
            assert await hand_over(home, await successor.hear()) == ""
            successor.tell("stop")
            assert await successor.hear() == ("calls", RECEIVED, 0, sent_from(home))


async def senders_are_lost(transport: str, caught: Sequence[tuple[Peer, Recorder, list[int]]], pool: TestPool) -> None:
    for peer, listener, blocks in caught:
        if peer.point in AFTER_COMMIT:
            await listener.until("committed")
            assert (pool.blocks[blocks] == FILL).all(), peer.point
        elif peer.point != "connected":
            await listener.until("failed")
            if not way_of(transport).fences:
                assert ("writer_stopped" in listener.calls) is not way_of(transport).peer_writes, peer.point


async def senders_let_go(caught: Sequence[tuple[Peer, Recorder, list[int]]]) -> None:
    for peer, listener, _ in caught:
        peer.signal(signal.SIGCONT)
        peer.tell("go on")
        word, error = await peer.hear()
        assert word == "ended", peer.point
        assert bool(error) is (peer.point not in AFTER_COMMIT), (peer.point, error)
        assert await peer.hear() == ("stopped",)
        if peer.point not in (*AFTER_COMMIT, "connected"):
            await listener.until("writer_stopped")
            assert listener.calls == FAILED, peer.point


async def receivers_keep_no_block(caught: Sequence[tuple[Peer, asyncio.Task[str]]], sent: bytes) -> None:
    for peer, _ in caught:
        peer.signal(signal.SIGCONT)
        peer.tell("go on")
        peer.tell("stop")
        word, calls, num_live, content = await peer.hear()
        assert (word, num_live) == ("calls", 0), peer.point
        # What the sender had said before it gave up may come to a good end; nobody may hear of two ends.
        assert calls in (["failed", "writer_stopped"], FAILED, RECEIVED), (peer.point, calls)
        if calls[-1] == "committed":
            assert content == sent, peer.point


@pytest.mark.usefixtures("nothing_stays")
@pytest.mark.parametrize("transport", EVERY_AND_RINGS)
async def test_who_stands_still_at_any_point_is_lost_in_time_and_lets_go_when_it_wakes(
    transport: str, leases: Leases
) -> None:
    """Senders and receivers at once: the lease is waited for once."""
    async with (
        at_home(transport, HOME) as home,
        senders(home, transport, DYING) as sending,
        receivers(home, transport, DYING) as receiving,
    ):
        for peer in [*(caught[0] for caught in sending), *(caught[0] for caught in receiving)]:
            peer.signal(signal.SIGSTOP)
        leases.shorten()
        await senders_are_lost(transport, sending, home.target)
        for peer, handing_over in receiving:
            assert bool(await outcome(handing_over)) is (peer.point != "committed"), peer.point
        await senders_let_go(sending)
        await receivers_keep_no_block(receiving, sent_from(home))
