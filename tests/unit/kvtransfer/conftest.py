"""Pools, listeners and connected pairs for the tests of the hand-off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import torch

from kvtransfer.base import BlockRef, Fingerprints, Offer
from kvtransfer.connection import Connection, expect
from kvtransfer.endpoint import Endpoint
from kvtransfer.frame import Frame, FrameType
from kvtransfer.handshake import Hello, agreed_verify
from kvtransfer.messages import Write
from kvtransfer.pool import Pool
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from kvtransfer.timing import Timing
from kvtransfer.transport import SendingLane
from kvtransfer.transports import named
from tandem.errors import TransferError
from tandem.types import BlockId
from tests.manual_clock import ManualClock
from tests.standins.cuda import StandInCuda, fresh
from tests.transports import PRINTS, WAYS, SharedPool, TestPool, transport_of
from tests.transports import make_pool as pool_for

QUICK = Timing(lease_s=1.5, reply_s=2.0, stop_s=1.0)
PATIENT = Timing(lease_s=15.0, reply_s=15.0, stop_s=1.0)
"""Of tests in which nobody falls silent: a busy machine may stand still for seconds."""
PATIENCE_S = 20.0


@dataclass
class Recorder:
    """A listener that writes down what it is told and checks the order of the calls."""

    calls: list[str] = field(default_factory=list)
    payload: bytes | None = None
    error: TransferError | None = None
    refuse_with: TransferError | None = None
    breaks_at_commit: bool = False
    """Whether a failure may follow the commit, as it does if `on_committed` raises."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def on_receiving(self) -> None:
        assert self.calls == []
        self._add("receiving")
        if self.refuse_with is not None:
            raise self.refuse_with

    def on_committed(self, first_token_payload: bytes) -> None:
        assert self.calls == ["receiving"]
        self.payload = first_token_payload
        self._add("committed")

    def on_failed(self, error: TransferError) -> None:
        assert self.calls in ([], ["receiving"], *([["receiving", "committed"]] if self.breaks_at_commit else []))
        self.error = error
        self._add("failed")

    def on_writer_stopped(self) -> None:
        assert self.calls[-1:] == ["failed"]
        self._add("writer_stopped")

    async def until(self, call: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while call not in self.calls:
                self._changed.clear()
                await self._changed.wait()

    def _add(self, call: str) -> None:
        self.calls.append(call)
        self._changed.set()


@dataclass
class Pair:
    """A receiver and a sender with pools of their own."""

    source: TestPool
    target: TestPool
    receiver: KvReceiver
    sender: KvSender
    clock: ManualClock

    def offer(
        self,
        listener: Recorder,
        block_ids: tuple[int, ...] = (3, 1, 2),
        expires_in_s: float = 30.0,
        first_block: int = 0,
    ) -> Offer:
        refs = tuple(BlockRef(BlockId(i), generation=7 + i) for i in block_ids)
        return self.receiver.offer(refs, listener, expires_in_s, first_block)

    async def open(self, offer: Offer):
        return await self.sender.open(offer.ticket, offer.endpoint, timeout_s=30.0)

    def landed(self, sources: tuple[int, ...], targets: tuple[int, ...]) -> bool:
        return torch.equal(self.source.blocks[list(sources)], self.target.blocks[list(targets)])


@asynccontextmanager
async def _paired(
    transport: str, timing: Timing = PATIENT, offered: tuple[str, ...] | None = None
) -> AsyncIterator[Pair]:
    clock = ManualClock()
    source, target = pool_for(transport), pool_for(transport)
    spoken = transport if transport == "auto" else transport_of(transport)
    names = offered or (("shm", "tcp") if transport == "auto" else (spoken,))
    receiver = KvReceiver(target.memory, PRINTS, clock, names, "127.0.0.1", timing=timing)
    sender = KvSender(source.memory, PRINTS, clock, spoken, timing=timing)
    await receiver.start()
    try:
        yield Pair(source, target, receiver, sender, clock)
        receiver.check_invariants()
    finally:
        await sender.stop()
        await receiver.stop()
        source.close()
        target.close()


@pytest.fixture
def paired() -> Callable:
    """`async with paired("shm") as pair`: a connected sender and receiver."""
    return _paired


@pytest.fixture
def cuda() -> Iterator[StandInCuda]:
    """The stand-in for the CUDA driver: its settings are this test's, and nothing of it may be left over."""
    with fresh() as standin:
        yield standin


@pytest.fixture
def make_recorder() -> type[Recorder]:
    return Recorder


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def make_pool() -> Iterator[Callable[..., SharedPool]]:
    pools: list[SharedPool] = []

    def make(*args: int) -> SharedPool:
        pools.append(SharedPool(*args))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def prints() -> Fingerprints:
    return PRINTS


@pytest.fixture
def quick() -> Timing:
    return QUICK


@pytest.fixture
def patient() -> Timing:
    return PATIENT


class RawSender:
    """Speaks the wire by hand, so that it can say what no sender of ours would; payload goes by the true lane."""

    def __init__(self, connection: Connection, lane: SendingLane, pool: TestPool) -> None:
        self.connection = connection
        self._lane = lane
        self._pool = pool

    def say(self, kind: FrameType, number: int = 0, payload: bytes = b"", seq: int = 0, inline: bytes = b"") -> None:
        self.connection.send(Frame(kind, number, seq, payload), [memoryview(inline)] if inline else ())

    async def put(self, number: int, block_id: int, data: bytes, *, spoil: bool = False) -> int:
        """One block at position 0, as the first WRITE; a spoilt one is announced with another checksum.

        Returns what it was announced with.
        """
        self._pool.blocks[0] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        loan = await self._lane.reserve(1)
        (checksum,) = await self._lane.place((BlockId(0),), (BlockRef(BlockId(block_id), 0),), loan)
        checksum ^= spoil
        write = Frame(FrameType.WRITE, number, payload=Write(0, (checksum,)).encode())
        sent = self._lane.announce(self.connection, write, (BlockId(0),), loan)
        if sent is not None:
            await sent
        return checksum

    async def hear(self) -> Frame:
        while (frame := await self.connection.receive()).type is FrameType.HEARTBEAT:
            pass
        return frame

    async def ask(self, *args, **kwargs) -> Frame:
        self.say(*args, **kwargs)
        return await self.hear()

    async def open(self, offer: Offer) -> int:
        number = int(offer.transfer_id, 16)
        assert (await self.ask(FrameType.OPEN, number, offer.ticket)).type is FrameType.OPEN_OK
        return number


@asynccontextmanager
async def _raw(offer: Offer, transport: str, hello: Hello | None = None) -> AsyncIterator[RawSender]:
    pool = pool_for(transport)
    local = Pool(pool.memory, PRINTS)
    (way,) = named((transport,))
    sock, lane = await way.dial(local, Endpoint.decode(offer.endpoint).reach[transport], None)
    connection = Connection(sock, QUICK)
    try:
        await lane.secure(connection)
        connection.start()
        ours = hello or Hello.of(local, lane)
        connection.send(Frame(FrameType.HELLO, payload=ours.encode()))
        theirs = Hello.decode(expect(await lane.receive_hello(connection), FrameType.HELLO).payload)
        if hello is None:
            lane.attach(theirs, agreed_verify(ours, theirs))
            await lane.prepare()
        yield RawSender(connection, lane, pool)
    finally:
        lane.close()
        await lane.closed()
        if WAYS[transport].peer_writes:
            connection.send(Frame(FrameType.BYE))
            await connection.finish()
        await connection.close()
        local.close()
        pool.close()


@pytest.fixture
def raw() -> Callable:
    """`async with raw(offer, "tcp") as peer`: a sender that speaks the wire by hand."""
    return _raw
