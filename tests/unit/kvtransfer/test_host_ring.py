"""Hand-offs through rings of few rows: all arrives, nobody waits for ever, every row comes back."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from kvtransfer.base import BlockRef, Handoff
from kvtransfer.pool import Pool
from kvtransfer.receiver import KvReceiver
from kvtransfer.rows import Rows
from kvtransfer.sender import KvSender
from kvtransfer.timing import Timing
from kvtransfer.transports import shm
from kvtransfer.transports.same_host import SharingLane
from tandem.errors import FrameError, PeerLost, TransferError
from tandem.types import BlockId
from tests.manual_clock import ManualClock

WAYS = ["shm", "tcp"]
NUM_BLOCKS = 90
PATIENCE_S = 20.0


class Staging:
    """A pool that rows of host memory are copied from and to, while the gate is open."""

    def __init__(self, pool: torch.Tensor) -> None:
        self.num_blocks = len(pool)
        self.pool = pool
        self.gate = asyncio.Event()
        self.gate.set()

    async def copy_out(self, block_ids: Sequence[BlockId], into: Rows, rows: Sequence[int]) -> None:
        await self.gate.wait()
        into.array[list(rows)] = self.pool.numpy()[list(block_ids)]

    async def copy_in(self, source: Rows, rows: Sequence[int], block_ids: Sequence[BlockId]) -> None:
        await self.gate.wait()
        self.pool.numpy()[list(block_ids)] = source.array[list(rows)]


@dataclass
class Node:
    """A worker that sends and receives: two ends over one pool."""

    staging: Staging
    receiver: KvReceiver
    sender: KvSender

    @property
    def pools(self) -> tuple[Pool, Pool]:
        return self.receiver._pool, self.sender._pool

    async def open(self, to: Node, listener: Any, targets: Sequence[int]) -> Handoff:
        refs = tuple(BlockRef(BlockId(i), 1) for i in targets)
        offer = to.receiver.offer(refs, listener, 60.0)
        return await self.sender.open(offer.ticket, offer.endpoint, PATIENCE_S)

    async def send(self, to: Node, listener: Any, sources: Sequence[int], targets: Sequence[int]) -> str:
        handoff = await self.open(to, listener, targets)
        await handoff.push(0, tuple(BlockId(i) for i in sources))
        return (await handoff.commit(b"")).transport


@pytest.fixture
def nodes(make_pool: Callable[..., Any], prints: Any, patient: Timing) -> Callable[..., Any]:
    """`async with nodes("shm", 2) as (one, other)`: each with a ring of 16 rows; at the end all rows are free."""

    @asynccontextmanager
    async def opened(way: str, count: int = 2, timing: Timing = patient) -> AsyncIterator[list[Node]]:
        made: list[Node] = []
        for _ in range(count):
            pool = torch.randint(0, 256, (NUM_BLOCKS, prints.layout.block_bytes), dtype=torch.uint8)
            staging = Staging(pool)
            memory = dataclasses.replace(make_pool(16).memory, staging=staging)
            receiver = KvReceiver(memory, prints, ManualClock(), ("shm", "tcp"), "127.0.0.1", timing=timing)
            made.append(Node(staging, receiver, KvSender(memory, prints, ManualClock(), way, timing=timing)))
            await receiver.start()
        pools = [pool for node in made for pool in node.pools]
        try:
            yield made
        finally:
            for node in made:
                node.staging.gate.set()
            for node in made:
                await node.sender.stop()
            for node in made:
                await node.receiver.stop()
        for pool in pools:
            assert len(pool._slices) == 8
            assert pool.arriving.num_free == pool.leaving.num_free == 4

    return opened


@pytest.mark.parametrize("way", WAYS)
async def test_more_blocks_than_rows_pass_through(nodes: Callable[..., Any], make_recorder: Any, way: str) -> None:
    async with nodes(way) as (one, other):
        order = [int(i) for i in np.random.default_rng(0).permutation(NUM_BLOCKS)]
        await one.send(other, make_recorder(), range(NUM_BLOCKS), order)
        assert torch.equal(other.staging.pool[order], one.staging.pool)


@pytest.mark.parametrize("way", WAYS)
async def test_many_hand_offs_share_a_ring_in_both_directions(
    nodes: Callable[..., Any], make_recorder: Any, way: str
) -> None:
    async with nodes(way) as (one, other):
        before = {id(node): node.staging.pool.clone() for node in (one, other)}
        pairs = [(one, other), (other, one)]
        sent = [
            sender.send(receiver, make_recorder(), range(start, start + 5), range(45 + start, 50 + start))
            for start in range(0, 40, 5)
            for sender, receiver in pairs
        ]
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*sent)
        for sender, receiver in pairs:
            assert torch.equal(receiver.staging.pool[45:85], before[id(sender)][:40])


@pytest.mark.parametrize("way", WAYS)
async def test_a_hand_off_that_waits_for_room_ends_when_it_is_withdrawn(
    nodes: Callable[..., Any], make_recorder: Any, way: str
) -> None:
    async with nodes(way) as (one, other):
        other.staging.gate.clear()
        listener = make_recorder()
        refs = tuple(BlockRef(BlockId(i), 1) for i in range(20))
        offer = other.receiver.offer(refs, listener, 60.0)
        handoff = await one.sender.open(offer.ticket, offer.endpoint, PATIENCE_S)
        pushing = asyncio.create_task(handoff.push(0, tuple(BlockId(i) for i in range(20))))
        await asyncio.wait({pushing}, timeout=0.1)
        assert not pushing.done()
        other.receiver.withdraw(offer.transfer_id)
        other.staging.gate.set()
        with pytest.raises(TransferError, match="withdrew"):
            await asyncio.wait_for(pushing, PATIENCE_S)
        await listener.until("writer_stopped")
        await one.send(other, make_recorder(), range(20), range(20))


@pytest.mark.parametrize("way", WAYS)
async def test_whoever_waits_for_room_that_does_not_come_gives_up(
    nodes: Callable[..., Any], make_recorder: Any, way: str
) -> None:
    async with nodes(way, timing=Timing(lease_s=5.0, reply_s=1.0, stop_s=1.0)) as (one, other):
        handoff = await one.open(other, make_recorder(), range(20))
        (_, leaving), (arriving, _) = one.pools, other.pools
        held = [await part.taken(1) for part in (leaving.leaving, arriving.arriving) for _ in range(4)]
        if way == "shm":
            other.staging.gate.clear()
        with pytest.raises(PeerLost, match="no answer"):
            await handoff.push(0, tuple(BlockId(i) for i in range(20)))
        for loan in held:
            loan.release()
        other.staging.gate.set()
        await handoff.abort()


async def test_rows_that_come_back_to_others_count_as_progress(nodes: Callable[..., Any], make_recorder: Any) -> None:
    async with nodes("tcp") as (one, other):
        handoff: Any = await one.open(other, make_recorder(), range(2))
        before = handoff._row_progress()
        (await one.pools[1].leaving.taken(1)).release()
        assert handoff._row_progress() == before + 1
        await handoff.abort()


async def test_a_write_into_rows_of_another_sender_fails_its_hand_off(
    nodes: Callable[..., Any], make_recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with nodes("shm") as (one, other):
        announce = shm._SendingLane.announce

        def lie(self: Any, sink: Any, write: Any, sources: Any, loan: Any) -> Any:
            loan.rows = tuple(row - 1 for row in loan.rows)
            return announce(self, sink, write, sources, loan)

        listener = make_recorder()
        handoff = await one.open(other, listener, [0])
        with monkeypatch.context() as patched:
            patched.setattr(shm._SendingLane, "announce", lie)
            await asyncio.gather(handoff.push(0, (BlockId(0),)), return_exceptions=True)
        await listener.until("failed")
        assert isinstance(listener.error, FrameError)
        await handoff.abort()
        await listener.until("writer_stopped")
        one.sender._forget(next(iter(one.sender._links)))  # its book of rows was falsified, too


async def test_a_slice_stays_out_of_use_until_its_peer_is_proven_to_have_stopped(
    nodes: Callable[..., Any], make_recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = asyncio.Event()
    monkeypatch.setattr(SharingLane, "peer_dead", lambda _: dead.wait())
    async with nodes("shm") as (one, other):
        listener = make_recorder()
        handoff: Any = await one.open(other, listener, range(4))
        pool = other.pools[0]
        assert len(pool._slices) == 7
        (session,) = other.receiver._sessions.values()
        session._connection._break(PeerLost("cut"))
        await listener.until("failed")
        await asyncio.sleep(0)
        assert len(pool._slices) == 7
        assert listener.calls == ["receiving", "failed"]
        dead.set()
        await listener.until("writer_stopped")
        async with asyncio.timeout(PATIENCE_S):
            while other.receiver._sessions:
                await asyncio.wait(tuple(other.receiver._sessions))
        assert len(pool._slices) == 8
        await handoff.abort()


async def test_without_a_slice_a_sender_takes_the_next_transport(nodes: Callable[..., Any], make_recorder: Any) -> None:
    async with nodes("auto") as (one, other):
        pool = other.pools[0]
        lent = [rows for _ in range(8) if (rows := pool.lend_slice()) is not None]
        assert await one.send(other, make_recorder(), [1], [2]) == "tcp"
        assert torch.equal(other.staging.pool[2], one.staging.pool[1])
        for rows in lent:
            pool.return_slice(rows)


async def test_one_sender_more_than_there_are_slices_takes_that_of_the_one_that_was_idle_longest(
    nodes: Callable[..., Any], make_recorder: Any
) -> None:
    async with nodes("shm", 10) as (other, *senders):
        for number, one in enumerate(senders):
            assert await one.send(other, make_recorder(), [1], [number]) == "shm"
        assert len(other.receiver._sessions) == 8
        assert await senders[0].send(other, make_recorder(), [2], [9]) == "shm"
        assert torch.equal(
            other.staging.pool[[8, 9]], torch.stack([senders[8].staging.pool[1], senders[0].staging.pool[2]])
        )


async def test_while_hand_offs_are_open_on_all_slices_none_is_cut_short(
    nodes: Callable[..., Any], make_recorder: Any
) -> None:
    async with nodes("shm", 10) as (other, *senders):
        handoffs = [await one.open(other, make_recorder(), [number]) for number, one in enumerate(senders[:8])]
        with pytest.raises(TransferError):
            await senders[8].open(other, make_recorder(), [9])
        for number, handoff in enumerate(handoffs):
            await handoff.push(0, (BlockId(1),))
            await handoff.commit(b"")
            assert torch.equal(other.staging.pool[number], senders[number].staging.pool[1])
