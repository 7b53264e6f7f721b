"""Hand-offs through rings of few rows: all arrives, nobody waits for ever, every row comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from kvtransfer.base import Handoff
from kvtransfer.pool import Pool
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from kvtransfer.timing import Timing
from kvtransfer.transports import shm
from kvtransfer.transports.same_host import SharingLane
from tandem.errors import FrameError, PeerLost, TransferError
from tests.kv_ends import FAILED, PATIENCE_S, PATIENT, Recorder, held_back, push_and_commit, refs_of
from tests.manual_clock import ManualClock
from tests.transports import PRINTS, StagedPool

each_way = pytest.mark.parametrize("way", ["shm", "tcp"])
NUM_BLOCKS = 90


@dataclass
class Node:
    """A worker that sends and receives: two ends over one pool."""

    pool: StagedPool
    receiver: KvReceiver
    sender: KvSender

    @property
    def pools(self) -> tuple[Pool, Pool]:
        return self.receiver._pool, self.sender._pool

    async def open(self, to: Node, listener: Any, targets: Sequence[int]) -> Handoff:
        offer = to.receiver.offer(refs_of(targets), listener, 60.0)
        return await self.sender.open(offer.ticket, offer.endpoint, PATIENCE_S)

    async def send(self, to: Node, sources: Sequence[int], targets: Sequence[int]) -> str:
        return (await push_and_commit(await self.open(to, Recorder(), targets), sources)).transport


@asynccontextmanager
async def nodes(way: str, count: int = 2, timing: Timing = PATIENT) -> AsyncIterator[list[Node]]:
    """`async with nodes("shm") as (one, other)`: each with a ring of 16 rows; at the end all rows are free."""
    made: list[Node] = []
    for _ in range(count):
        pool = StagedPool(NUM_BLOCKS, ring_rows=16)
        clock, both = ManualClock(), ("shm", "tcp")
        receiver = KvReceiver(pool.memory, PRINTS, clock, both, "127.0.0.1", timing=timing)
        made.append(Node(pool, receiver, KvSender(pool.memory, PRINTS, clock, way, timing=timing)))
        await receiver.start()
    pools = [pool for node in made for pool in node.pools]
    try:
        yield made
    finally:
        for node in made:
            node.pool.staging.gate.set()
        for node in made:
            await node.sender.stop()
        for node in made:
            await node.receiver.stop()
    for pool in pools:
        assert len(pool._slices) == 8
        assert pool.arriving.num_free == pool.leaving.num_free == 4
    for node in made:
        node.pool.close()


@each_way
async def test_more_blocks_than_rows_pass_through(way: str) -> None:
    async with nodes(way) as (one, other):
        order = [int(i) for i in np.random.default_rng(0).permutation(NUM_BLOCKS)]
        await one.send(other, range(NUM_BLOCKS), order)
        assert torch.equal(other.pool.blocks[order], one.pool.blocks)


@each_way
async def test_many_hand_offs_share_a_ring_in_both_directions(way: str) -> None:
    async with nodes(way) as (one, other):
        before = {id(node): node.pool.blocks.clone() for node in (one, other)}
        pairs = [(one, other), (other, one)]
        sent = [
            sender.send(receiver, range(start, start + 5), range(45 + start, 50 + start))
            for start in range(0, 40, 5)
            for sender, receiver in pairs
        ]
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*sent)
        for sender, receiver in pairs:
            assert torch.equal(receiver.pool.blocks[45:85], before[id(sender)][:40])


@each_way
async def test_a_hand_off_that_waits_for_room_ends_when_it_is_withdrawn(way: str) -> None:
    async with nodes(way) as (one, other):
        other.pool.staging.gate.clear()
        listener = Recorder()
        offer = other.receiver.offer(refs_of(range(20)), listener, 60.0)
        handoff = await one.sender.open(offer.ticket, offer.endpoint, PATIENCE_S)
        pushing = asyncio.create_task(handoff.push(0, tuple(range(20))))
        assert await held_back(pushing, 0.1)
        other.receiver.withdraw(offer.transfer_id)
        other.pool.staging.gate.set()
        with pytest.raises(TransferError, match="withdrew"):
            await asyncio.wait_for(pushing, PATIENCE_S)
        await listener.until("writer_stopped")
        await one.send(other, range(20), range(20))


@each_way
async def test_whoever_waits_for_room_that_does_not_come_gives_up(way: str) -> None:
    async with nodes(way, timing=Timing(lease_s=5.0, reply_s=1.0, stop_s=1.0)) as (one, other):
        handoff = await one.open(other, Recorder(), range(20))
        (_, leaving), (arriving, _) = one.pools, other.pools
        held = [await part.taken(1) for part in (leaving.leaving, arriving.arriving) for _ in range(4)]
        if way == "shm":
            other.pool.staging.gate.clear()
        with pytest.raises(PeerLost, match="no answer"):
            await handoff.push(0, tuple(range(20)))
        for loan in held:
            loan.release()
        other.pool.staging.gate.set()
        await handoff.abort()


async def test_rows_that_come_back_to_others_count_as_progress() -> None:
    async with nodes("tcp") as (one, other):
        handoff: Any = await one.open(other, Recorder(), range(2))
        before = handoff._progress(one.pools[1].leaving)
        (await one.pools[1].leaving.taken(1)).release()
        assert handoff._progress(one.pools[1].leaving) == before + 1
        await handoff.abort()


async def test_a_write_into_rows_of_another_sender_fails_its_hand_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async with nodes("shm") as (one, other):
        announce = shm._SendingLane.announce

        def lie(self: Any, sink: Any, write: Any, sources: Any, loan: Any) -> Any:
            loan.rows = tuple(row - 1 for row in loan.rows)
            return announce(self, sink, write, sources, loan)

        listener = Recorder()
        handoff = await one.open(other, listener, [0])
        with monkeypatch.context() as patched:
            patched.setattr(shm._SendingLane, "announce", lie)
            await asyncio.gather(handoff.push(0, (0,)), return_exceptions=True)
        await listener.until("failed")
        assert isinstance(listener.error, FrameError)
        await handoff.abort()
        await listener.until("writer_stopped")
        one.sender._forget(next(iter(one.sender._links)))  # its book of rows was falsified, too


async def test_a_slice_stays_out_of_use_until_its_peer_is_proven_to_have_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dead = asyncio.Event()
    monkeypatch.setattr(SharingLane, "peer_dead", lambda _: dead.wait())
    async with nodes("shm") as (one, other):
        listener = Recorder()
        handoff: Any = await one.open(other, listener, range(4))
        pool = other.pools[0]
        assert len(pool._slices) == 7
        (session,) = other.receiver._sessions.values()
        session._connection._break(PeerLost("cut"))
        await listener.until("failed")
        await asyncio.sleep(0)
        assert len(pool._slices) == 7
        assert listener.calls == FAILED[:2]
        dead.set()
        await listener.until("writer_stopped")
        async with asyncio.timeout(PATIENCE_S):
            while other.receiver._sessions:
                await asyncio.wait(tuple(other.receiver._sessions))
        assert len(pool._slices) == 8
        await handoff.abort()


async def test_without_a_slice_a_sender_takes_the_next_transport() -> None:
    async with nodes("auto") as (one, other):
        pool = other.pools[0]
        lent = [rows for _ in range(8) if (rows := pool.lend_slice()) is not None]
        assert await one.send(other, [1], [2]) == "tcp"
        assert torch.equal(other.pool.blocks[2], one.pool.blocks[1])
        for rows in lent:
            pool.return_slice(rows)


async def test_one_sender_more_than_there_are_slices_takes_that_of_the_one_that_was_idle_longest() -> None:
    async with nodes("shm", 10) as (other, *senders):
        for number, one in enumerate(senders):
            assert await one.send(other, [1], [number]) == "shm"
        assert len(other.receiver._sessions) == 8
        assert await senders[0].send(other, [2], [9]) == "shm"
        assert torch.equal(
            other.pool.blocks[[8, 9]], torch.stack([senders[8].pool.blocks[1], senders[0].pool.blocks[2]])
        )


async def test_while_hand_offs_are_open_on_all_slices_none_is_cut_short() -> None:
    async with nodes("shm", 10) as (other, *senders):
        handoffs = [await one.open(other, Recorder(), [number]) for number, one in enumerate(senders[:8])]
        with pytest.raises(TransferError):
            await senders[8].open(other, Recorder(), [9])
        for number, handoff in enumerate(handoffs):
            await push_and_commit(handoff, (1,))
            assert torch.equal(other.pool.blocks[number], senders[number].pool.blocks[1])
