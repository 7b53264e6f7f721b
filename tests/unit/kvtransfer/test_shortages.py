"""Wires that are slow, pools that are full and memory that is exhausted, over every transport."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import torch

from kvtransfer import device_work
from kvtransfer import link as link_module
from kvtransfer import receiver as receiver_module
from kvtransfer.session import Session
from kvtransfer.timing import Timing
from tandem.errors import TransferError
from tests.kv_ends import FAILED, PATIENCE_S, RECEIVED, Recorder, ends, paired, push_and_commit, until
from tests.standins.cuda import standin
from tests.transports import (
    EVERY,
    EVERY_AND_RINGS,
    NUM_BLOCKS,
    USABLE_AND_RINGS,
    make_pool,
    telling,
    transport_of,
)

BESIDE_TARGETS, BESIDE_SOURCES = (7, 6), (0, 8)
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


async def test_slow_wires_that_move_take_as_long_as_they_take(
    hook: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block in each WRITE; all of them together take longer than an answer may."""
    blocks = tuple(range(NUM_BLOCKS))

    async def slow() -> None:
        await asyncio.sleep(0.1)

    async def hand_over_slowly(transport: str, pair: Any) -> None:
        with telling(transport):
            assert (await pair.hand_over(Recorder(), blocks, blocks)).num_blocks == NUM_BLOCKS

    monkeypatch.setattr("kvtransfer.transport.PIECE_BYTES", 1)
    monkeypatch.setattr("kvtransfer.transport.DEVICE_PIECE_BYTES", 1)
    hook(receiving=slow)
    timing = Timing(lease_s=20.0, reply_s=1.2)
    async with AsyncExitStack() as stack:
        pairs = {each: await stack.enter_async_context(paired(each, timing)) for each in USABLE_AND_RINGS}
        async with asyncio.TaskGroup() as tasks:
            for transport, pair in pairs.items():
                tasks.create_task(hand_over_slowly(transport, pair))


@pytest.mark.parametrize("transport", EVERY_AND_RINGS)
async def test_two_pools_without_a_free_block_hand_over_to_each_other(transport: str) -> None:
    """Half of each pool is sent, the other half received, all at once and block by block."""
    half, name = NUM_BLOCKS // 2, transport_of(transport)
    pools = [make_pool(transport), make_pool(transport)]
    sent = [pool.blocks[:half].clone() for pool in pools]

    async def one(pair: Any, block: int) -> None:
        await push_and_commit(await pair.begin(Recorder(), (half + block,)), (block,))

    async with (
        ends(pools[0], pools[1], name, (name,), closes=False) as there,
        ends(pools[1], pools[0], name, (name,)) as back,
    ):
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
            for block in range(half):
                tasks.create_task(one(there, block))
                tasks.create_task(one(back, block))
        for pool, content in zip(pools, reversed(sent), strict=True):
            assert torch.equal(pool.blocks[half:], content)
        assert there.receiver.num_live == back.receiver.num_live == 0


async def _one_fails_and_others_go_on(pair: Any) -> str:
    """What the sender of the one is told."""
    failing, beside = Recorder(), Recorder()
    other = await pair.begin(beside, BESIDE_TARGETS)
    handoff = await pair.begin(failing)
    with pytest.raises(TransferError) as told:
        await push_and_commit(handoff)
    await handoff.abort()
    await failing.until("writer_stopped")
    assert failing.calls == FAILED
    await push_and_commit(other, BESIDE_SOURCES)
    assert beside.calls == RECEIVED
    assert pair.landed(BESIDE_SOURCES, BESIDE_TARGETS)
    await pair.hand_over(Recorder())
    assert pair.receiver.num_live == 0
    return str(told.value)


@pytest.mark.parametrize("transport", EVERY_AND_RINGS)
@pytest.mark.parametrize("side", ["sending", "receiving"])
async def test_a_hand_off_for_which_the_host_has_no_memory_fails_alone(
    hook: Callable[..., None], transport: str, side: str
) -> None:
    hook(**{side: Once(MemoryError())})
    async with paired(transport) as pair:
        assert "no memory left" in await _one_fails_and_others_go_on(pair)


@pytest.mark.parametrize("transport", DEVICES)
@pytest.mark.parametrize("calls_before", [0, 1], ids=["sender", "receiver"])
async def test_a_hand_off_for_which_the_device_has_no_memory_fails_alone(
    monkeypatch: pytest.MonkeyPatch, transport: str, calls_before: int
) -> None:
    digest, calls = device_work.digest_blocks, iter(range(100))

    def exhausted(*args: Any) -> torch.Tensor:
        if next(calls) == calls_before:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return digest(*args)

    monkeypatch.setattr(device_work, "digest_blocks", exhausted)
    async with paired(transport) as pair:
        assert "out of memory" in await _one_fails_and_others_go_on(pair)


@pytest.mark.parametrize("transport", DEVICES)
@pytest.mark.parametrize("call", ["cuStreamCreate", "cuEventCreate"])
async def test_a_connection_for_which_the_device_has_no_memory_leaves_the_offer_to_the_next(
    recorder: Recorder, transport: str, call: str
) -> None:
    async with paired(transport) as pair:
        live = standin().live()
        offer = pair.offer(recorder)
        standin().set("FAIL", f"{call}:1:2")
        try:
            with pytest.raises(TransferError):
                await pair.open(offer)
        finally:
            standin().set("FAIL", "")
        assert recorder.calls == []
        await push_and_commit(await pair.open(offer))
        assert pair.landed()
        await pair.sender.stop()
        await pair.receiver.stop()
        await until(lambda: standin().live() == live)
