"""A receiver by NCCL whose sender is another process that is killed, or cannot stop its own communicator."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvtransfer.base import Offer
from kvtransfer.receiver import KvReceiver
from kvtransfer.timing import Timing
from shell.clock import MonotonicClock
from tests.faults.kv_peer import Forked, warm_up
from tests.faults.nccl_peer_process import nccl_peer
from tests.kv_ends import FAILED, Recorder, refs_of, until
from tests.standins.cuda import DevicePool
from tests.standins.nccl import StandInNccl, standin_nccl
from tests.transports import PRINTS

PATIENCE_S = 60.0


@dataclass
class Home:
    """A receiver in this process."""

    nccl: StandInNccl
    pool: DevicePool
    receiver: KvReceiver
    listener: Recorder
    offer: Offer

    def nothing_stays(self) -> bool:
        """Whether every communicator and stream of this process is gone."""
        live = self.nccl.live()
        return not live["communicators"] and not live["moves"] and not self.nccl.cuda.live()["streams"]


@pytest.fixture(scope="module")
def stand_in() -> StandInNccl:
    return standin_nccl()


@pytest.fixture
def nccl(stand_in: StandInNccl) -> Iterator[StandInNccl]:
    stand_in.reset()
    stand_in.cuda.reset()
    yield stand_in
    stand_in.reset()


@asynccontextmanager
async def at_home(nccl: StandInNccl) -> AsyncIterator[Home]:
    pool = DevicePool(16, 256)
    pool.blocks.fill_(0)
    clock, timing = MonotonicClock(), Timing(lease_s=PATIENCE_S)
    receiver = KvReceiver(pool.memory, PRINTS, clock, ("nccl",), "127.0.0.1", timing=timing, known=(nccl.transport(),))
    await receiver.start()
    listener = Recorder()
    offer = receiver.offer(refs_of((3, 1)), listener, PATIENCE_S)
    try:
        home = Home(nccl, pool, receiver, listener, offer)
        yield home
        await until(home.nothing_stays, PATIENCE_S)
    finally:
        await receiver.stop()
        pool.close()


@asynccontextmanager
async def sending(home: Home, abort_s: float = 5.0, **settings: str) -> AsyncIterator[Forked]:
    """The other process, which has the offer."""
    warm_up()
    peer = nccl_peer(abort_s, settings)
    try:
        peer.tell(home.offer.ticket, home.offer.endpoint)
        yield peer
    finally:
        peer.close()


async def test_a_sender_killed_while_both_begin_leaves_the_offer_to_the_next(nccl: StandInNccl) -> None:
    async with at_home(nccl) as home:
        async with sending(home, HANG="init") as peer:
            await until(lambda: nccl.live()["communicators"], PATIENCE_S)
            peer.signal(signal.SIGKILL)
            await until(home.nothing_stays, PATIENCE_S)
            assert home.listener.calls == []
        async with sending(home) as peer:
            await until(lambda: "committed" in home.listener.calls, PATIENCE_S)
            assert home.pool.blocks[[3, 1]].flatten().tolist() == [0xAB] * 512
            assert await peer.ended() == 0


async def test_a_sender_killed_in_the_middle_of_a_block_frees_it(nccl: StandInNccl, tmp_path: Path) -> None:
    (hold := tmp_path / "hold").touch()
    async with at_home(nccl) as home:
        nccl.set("HOLD", hold)
        async with sending(home) as peer:
            await until(lambda: home.pool.blocks[3, 0] == 0xAB, PATIENCE_S)
            assert home.listener.calls == ["receiving"]
            peer.signal(signal.SIGKILL)
            await until(lambda: "writer_stopped" in home.listener.calls, PATIENCE_S)
        assert home.listener.calls == FAILED
        await until(home.nothing_stays, PATIENCE_S)
        hold.unlink()
        assert home.receiver.num_live == 0
        assert not home.pool.blocks[3, 128:].any()  # the abort ended the receive where it was
        assert not home.pool.blocks[1].any()


async def test_a_sender_that_cannot_end_its_communicator_ends_itself(nccl: StandInNccl) -> None:
    async with at_home(nccl) as home, sending(home, 0.2, HANG="abort") as peer:
        await until(lambda: "committed" in home.listener.calls, PATIENCE_S)
        assert await peer.ended() == 1
