"""Wires that are slow, pools that are full and memory that is exhausted, over every transport."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import torch

from kvtransfer import link as link_module
from kvtransfer import receiver as receiver_module
from kvtransfer.base import BlockRef, Handoff
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from kvtransfer.session import Session
from kvtransfer.timing import Timing
from kvtransfer.transports import device
from tandem.errors import TransferError
from tandem.types import BlockId
from tests.manual_clock import ManualClock
from tests.standins.cuda import standin
from tests.transports import (
    EVERY,
    EVERY_AND_RINGS,
    NUM_BLOCKS,
    PRINTS,
    USABLE_AND_RINGS,
    make_pool,
    telling,
    transport_of,
)

TARGETS, SOURCES = (3, 1), (9, 4)
BESIDE_TARGETS, BESIDE_SOURCES = (5, 6), (2, 8)
PATIENCE_S = 20.0
DEVICES = [each for each in EVERY if each.values[0] in ("cuda_ipc", "nccl")]
Hook = Callable[[], Awaitable[None]]


class HookedLane:
    """A lane that does something more before its work."""

    def __init__(self, lane: Any, sending: Hook, receiving: Hook) -> None:
        self._lane = lane
        self._sending = sending
        self._receiving = receiving

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lane, name)

    async def place(self, *args: Any) -> tuple[int, ...]:
        await self._sending()
        checksums: tuple[int, ...] = await self._lane.place(*args)
        return checksums

    async def checksums(self, *args: Any) -> tuple[int, ...]:
        await self._receiving()
        checksums: tuple[int, ...] = await self._lane.checksums(*args)
        return checksums


async def nothing() -> None:
    pass


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`hook(sending=, receiving=)` is awaited before each piece is placed, and before each is verified."""

    def hooked(sending: Hook = nothing, receiving: Hook = nothing) -> None:
        made = link_module.OutgoingHandoff

        def outgoing(ticket: Any, sink: Any, lane: Any, *rest: Any) -> Any:
            return made(ticket, sink, HookedLane(lane, sending, receiving), *rest)  # type: ignore[arg-type]

        def session(connection: Any, lane: Any, *rest: Any) -> Session:
            return Session(connection, HookedLane(lane, sending, receiving), *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(link_module, "OutgoingHandoff", outgoing)
        monkeypatch.setattr(receiver_module, "Session", session)

    return hooked


class Once:
    """Raises the first time."""

    def __init__(self, error: BaseException) -> None:
        self.error: BaseException | None = error

    async def __call__(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error


async def hand_over(pair: Any, listener: Any) -> None:
    await _push_and_commit(await pair.open(pair.offer(listener, TARGETS)))
    assert listener.calls == ["receiving", "committed"]
    assert pair.landed(SOURCES, TARGETS)


async def test_slow_wires_that_move_take_as_long_as_they_take(
    paired: Any, make_recorder: Any, hook: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block in each WRITE; all of them together take longer than an answer may."""
    blocks = tuple(range(NUM_BLOCKS))

    async def slow() -> None:
        await asyncio.sleep(0.1)

    async def hand_over_slowly(transport: str, pair: Any) -> None:
        recorder = make_recorder()
        with telling(transport):
            handoff = await pair.open(pair.offer(recorder, blocks))
            await handoff.push(0, blocks)
            assert (await handoff.commit(b"")).num_blocks == NUM_BLOCKS
            assert recorder.calls == ["receiving", "committed"]
            assert pair.landed(blocks, blocks)

    monkeypatch.setattr("kvtransfer.handoff.PIECE_BYTES", 1)
    hook(receiving=slow)
    timing = Timing(lease_s=20.0, reply_s=1.2)
    async with AsyncExitStack() as stack:
        pairs = {each: await stack.enter_async_context(paired(each, timing)) for each in USABLE_AND_RINGS}
        async with asyncio.TaskGroup() as tasks:
            for transport, pair in pairs.items():
                tasks.create_task(hand_over_slowly(transport, pair))


@pytest.mark.parametrize("transport", EVERY_AND_RINGS)
async def test_two_pools_without_a_free_block_hand_over_to_each_other(transport: str, make_recorder: Any) -> None:
    """Half of each pool is sent, the other half received, all at once and block by block."""
    half, clock, name = NUM_BLOCKS // 2, ManualClock(), transport_of(transport)
    pools = [make_pool(transport), make_pool(transport)]
    senders = [KvSender(pool.memory, PRINTS, clock, name) for pool in pools]
    receivers = [KvReceiver(pool.memory, PRINTS, clock, (name,), "127.0.0.1") for pool in pools]
    sent = [pool.blocks[:half].clone() for pool in pools]

    async def one(sender: KvSender, receiver: KvReceiver, block: int) -> None:
        listener = make_recorder()
        offer = receiver.offer((BlockRef(BlockId(half + block), 1),), listener, PATIENCE_S)
        handoff = await sender.open(offer.ticket, offer.endpoint, PATIENCE_S)
        await handoff.push(0, (BlockId(block),))
        await handoff.commit(b"")
        assert listener.calls == ["receiving", "committed"]

    for receiver in receivers:
        await receiver.start()
    try:
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
            for block in range(half):
                tasks.create_task(one(senders[0], receivers[1], block))
                tasks.create_task(one(senders[1], receivers[0], block))
        for pool, content in zip(pools, reversed(sent), strict=True):
            assert torch.equal(pool.blocks[half:], content)
        assert [receiver.num_live for receiver in receivers] == [0, 0]
    finally:
        for end in (*senders, *receivers):
            await end.stop()
        for pool in pools:
            pool.close()


async def _push_and_commit(handoff: Handoff) -> None:
    await handoff.push(0, SOURCES)
    await handoff.commit(b"")


async def _one_fails_and_others_go_on(pair: Any, make_recorder: Any) -> str:
    """What the sender of the one is told."""
    failing, beside = make_recorder(), make_recorder()
    other = await pair.open(pair.offer(beside, BESIDE_TARGETS))
    handoff = await pair.open(pair.offer(failing, TARGETS))
    with pytest.raises(TransferError) as told:
        await _push_and_commit(handoff)
    await handoff.abort()
    await failing.until("writer_stopped")
    assert failing.calls == ["receiving", "failed", "writer_stopped"]
    await other.push(0, BESIDE_SOURCES)
    await other.commit(b"")
    assert beside.calls == ["receiving", "committed"]
    assert pair.landed(BESIDE_SOURCES, BESIDE_TARGETS)
    await hand_over(pair, make_recorder())
    assert pair.receiver.num_live == 0
    return str(told.value)


@pytest.mark.parametrize("transport", EVERY_AND_RINGS)
@pytest.mark.parametrize("side", ["sending", "receiving"])
async def test_a_hand_off_for_which_the_host_has_no_memory_fails_alone(
    paired: Any, make_recorder: Any, hook: Callable[..., None], transport: str, side: str
) -> None:
    hook(**{side: Once(MemoryError())})
    async with paired(transport) as pair:
        assert "no memory left" in await _one_fails_and_others_go_on(pair, make_recorder)


@pytest.mark.parametrize("transport", DEVICES)
@pytest.mark.parametrize("calls_before", [0, 1], ids=["sender", "receiver"])
async def test_a_hand_off_for_which_the_device_has_no_memory_fails_alone(
    paired: Any, make_recorder: Any, monkeypatch: pytest.MonkeyPatch, transport: str, calls_before: int
) -> None:
    digest, calls = device.digest_blocks, iter(range(100))

    def exhausted(*args: Any) -> torch.Tensor:
        if next(calls) == calls_before:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return digest(*args)

    monkeypatch.setattr(device, "digest_blocks", exhausted)
    async with paired(transport) as pair:
        assert "out of memory" in await _one_fails_and_others_go_on(pair, make_recorder)


@pytest.mark.parametrize("transport", DEVICES)
@pytest.mark.parametrize("call", ["cuStreamCreate", "cuEventCreate"])
async def test_a_connection_for_which_the_device_has_no_memory_leaves_the_offer_to_the_next(
    paired: Any, recorder: Any, transport: str, call: str
) -> None:
    async with paired(transport) as pair:
        live = standin().live()
        offer = pair.offer(recorder, TARGETS)
        standin().set("FAIL", f"{call}:1:2")
        try:
            with pytest.raises(TransferError):
                await pair.open(offer)
        finally:
            standin().set("FAIL", "")
        assert recorder.calls == []
        await _push_and_commit(await pair.open(offer))
        assert pair.landed(SOURCES, TARGETS)
        await pair.sender.stop()
        await pair.receiver.stop()
        async with asyncio.timeout(PATIENCE_S):
            while standin().live() != live:  # noqa: ASYNC110 - threads of lanes tell nobody
                await asyncio.sleep(0.002)
