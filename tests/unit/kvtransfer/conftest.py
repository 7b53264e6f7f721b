"""Pools, listeners and connected pairs for the tests of the hand-off."""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import torch

from kvtransfer.base import BlockRef, Fingerprints, Offer, PoolMemory
from kvtransfer.connection import Connection
from kvtransfer.endpoint import Endpoint
from kvtransfer.frame import Frame, FrameType
from kvtransfer.handshake import Hello, fingerprint_fields
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from kvtransfer.timing import Timing
from kvtransfer.transports import shm, tcp
from tandem.errors import TransferError
from tandem.kv_layout import DType, KvLayout
from tandem.types import BlockId, Incarnation
from tests.manual_clock import ManualClock

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, block_size=4, head_dim=8, dtype=DType.BFLOAT16)
PRINTS = Fingerprints(model="model-a", layout=LAYOUT)
QUICK = Timing(lease_s=1.5, reply_s=2.0, stop_s=1.0)
PATIENCE_S = 20.0


class SharedPool:
    """A pool of random bytes in a memfd, as an engine would own it."""

    def __init__(self, num_blocks: int = 16, block_bytes: int = LAYOUT.block_bytes) -> None:
        self.fd = os.memfd_create("test-pool")
        size = num_blocks * block_bytes
        os.ftruncate(self.fd, size)
        self._mapping = mmap.mmap(self.fd, size)
        self.blocks = torch.frombuffer(self._mapping, dtype=torch.uint8).view(num_blocks, block_bytes)
        self.blocks.copy_(torch.randint(0, 256, self.blocks.shape, dtype=torch.uint8))
        self.memory = PoolMemory(self.blocks, self.fd, Incarnation(secrets.token_hex(16)))

    def close(self) -> None:
        self.memory = self.blocks = None
        gc.collect()
        self._mapping.close()
        os.close(self.fd)


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

    source: SharedPool
    target: SharedPool
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
        return await self.sender.open(offer.ticket, offer.endpoint, timeout_s=5.0)

    def landed(self, sources: tuple[int, ...], targets: tuple[int, ...]) -> bool:
        return torch.equal(self.source.blocks[list(sources)], self.target.blocks[list(targets)])


@asynccontextmanager
async def _paired(
    transport: str, timing: Timing = QUICK, offered: tuple[str, ...] | None = None
) -> AsyncIterator[Pair]:
    clock = ManualClock()
    source, target = SharedPool(), SharedPool()
    names = offered or (("shm", "tcp") if transport == "auto" else (transport,))
    receiver = KvReceiver(target.memory, PRINTS, clock, names, "127.0.0.1", timing=timing)
    sender = KvSender(source.memory, PRINTS, clock, transport, timing=timing)
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


class RawSender:
    """Speaks the wire by hand, so that it can say what no sender of ours would."""

    def __init__(self, connection: Connection, rows: memoryview | None) -> None:
        self.connection = connection
        self.rows = rows

    def say(self, kind: FrameType, number: int = 0, payload: bytes = b"", seq: int = 0, inline: bytes = b"") -> None:
        self.connection.send(Frame(kind, number, seq, payload), [memoryview(inline)] if inline else ())

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
    fields = Endpoint.decode(offer.endpoint).reach[transport]
    if transport == "shm":
        sock = await shm.dial(fields["unix_name"])
    else:
        sock = await tcp.dial(fields["host"], int(fields["port"]))
    connection, mapping = Connection(sock, QUICK), None
    try:
        connection.start()
        hello = hello or Hello(Incarnation("ab" * 16), transport, 16, ("xxh3-64",), fingerprint_fields(PRINTS))
        connection.send(Frame(FrameType.HELLO, payload=hello.encode()))
        if transport == "shm":
            _, descriptor = await shm.receive_with_descriptor(connection)
            mapping = mmap.mmap(descriptor, 16 * LAYOUT.block_bytes)
            os.close(descriptor)
        else:
            assert (await connection.receive()).type is FrameType.HELLO
        yield RawSender(connection, mapping)
    finally:
        if mapping is not None:
            mapping.close()
            connection.send(Frame(FrameType.BYE))
            await connection.finish()
        await connection.close()


@pytest.fixture
def raw() -> Callable:
    """`async with raw(offer, "tcp") as peer`: a sender that speaks the wire by hand."""
    return _raw
