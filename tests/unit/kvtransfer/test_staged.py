"""Hand-offs between pools that transports do not reach: when bytes are copied, and what is said when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kvtransfer.base import BlockRef
from kvtransfer.staged import StagedReceiver, StagedSender
from kvtransfer.transports.inproc import InprocNetwork, InprocReceiver, InprocSender
from tandem.clock import ManualClock
from tandem.errors import TransferError
from tandem.types import BlockId

SOURCES, TARGETS = (BlockId(2), BlockId(9), BlockId(3)), (BlockId(4), BlockId(5), BlockId(0))


class GatedStaging:
    """A pool beside the rows; copies wait for their gate, and may break."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self.pool = torch.zeros_like(rows)
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: TransferError | None = None

    async def copy_out(self, block_ids: Sequence[BlockId]) -> None:
        await self._pass()
        self.rows[list(block_ids)] = self.pool[list(block_ids)]

    async def copy_in(self, block_ids: Sequence[BlockId]) -> None:
        await self._pass()
        self.pool[list(block_ids)] = self.rows[list(block_ids)]

    async def _pass(self) -> None:
        await self.gate.wait()
        if self.error is not None:
            raise self.error


class Pair:
    """Both sides, staged, in one loop."""

    def __init__(self, make_pool: Callable[..., Any], prints: Any) -> None:
        network, clock = InprocNetwork(), ManualClock()
        source, target = make_pool(), make_pool()
        self.out, self.into = GatedStaging(source.blocks), GatedStaging(target.blocks)
        self.sender = StagedSender(InprocSender(source.memory, prints, clock, network), self.out)
        self.receiver = StagedReceiver(InprocReceiver(target.memory, prints, clock, network), self.into)
        self.out.pool.copy_(torch.randint(0, 256, self.out.pool.shape, dtype=torch.uint8))

    async def commit(self, listener: Any) -> None:
        await self.receiver.start()
        offer = self.receiver.offer(tuple(BlockRef(block, 1) for block in TARGETS), listener, 60.0)
        handoff = await self.sender.open(offer.ticket, offer.endpoint, 5.0)
        await handoff.push(0, SOURCES[:2])
        await handoff.push(2, SOURCES[2:])
        await handoff.commit(b"first")
        await handoff.abort()

    async def stop(self) -> None:
        await self.receiver.stop()
        await self.sender.stop()


@pytest.fixture
def pair(make_pool: Callable[..., Any], prints: Any) -> Pair:
    return Pair(make_pool, prints)


async def test_blocks_go_from_pool_to_pool(pair: Pair, make_recorder: Callable[[], Any]) -> None:
    listener = make_recorder()
    await pair.commit(listener)
    await listener.until("committed")
    assert listener.payload == b"first"
    assert torch.equal(pair.into.pool[list(TARGETS)], pair.out.pool[list(SOURCES)])
    await pair.stop()
    assert pair.receiver.num_live == 0


async def test_nothing_is_committed_before_it_is_in_the_pool(pair: Pair, make_recorder: Callable[[], Any]) -> None:
    listener = make_recorder()
    pair.into.gate.clear()
    await pair.commit(listener)
    await asyncio.sleep(0)
    assert listener.calls == ["receiving"]
    assert pair.receiver.num_live == 1
    pair.into.gate.set()
    await listener.until("committed")
    await pair.stop()


async def test_a_copy_that_fails_on_the_way_in_fails_the_hand_off(pair: Pair, make_recorder: Callable[[], Any]) -> None:
    listener = make_recorder()
    pair.into.error = TransferError("the device is gone")
    await pair.commit(listener)
    await listener.until("writer_stopped")
    assert listener.calls == ["receiving", "failed", "writer_stopped"]
    assert listener.error is pair.into.error
    await pair.stop()


async def test_a_copy_that_fails_on_the_way_out_pushes_nothing(pair: Pair, make_recorder: Callable[[], Any]) -> None:
    listener = make_recorder()
    pair.out.error = TransferError("the device is gone")
    with pytest.raises(TransferError, match="device"):
        await pair.commit(listener)
    await pair.stop()
    assert "committed" not in listener.calls


async def test_stopping_waits_for_copies_and_fails_their_hand_offs(
    pair: Pair, make_recorder: Callable[[], Any]
) -> None:
    listener = make_recorder()
    pair.into.gate.clear()
    await pair.commit(listener)
    stopping = asyncio.create_task(pair.stop())
    await asyncio.sleep(0.01)
    assert not stopping.done()
    pair.into.gate.set()
    await stopping
    assert listener.calls == ["receiving", "failed", "writer_stopped"]
