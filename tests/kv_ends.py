"""Both ends of hand-offs in one process: pools, a listener that checks the order of its calls, blocks that cross."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from kvtransfer.base import BlockRefs, Fingerprints, Handoff, Offer, TransferReport
from kvtransfer.endpoint import Endpoint
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from kvtransfer.timing import Timing
from shell.clock import Clock
from tandem.errors import TransferError
from tandem.types import BlockId
from tests.manual_clock import ManualClock
from tests.transports import PRINTS, TestPool, make_pool, transport_of

QUICK = Timing(lease_s=1.5, reply_s=2.0, stop_s=1.0)
PATIENT = Timing(lease_s=15.0, reply_s=15.0, stop_s=1.0)
"""Of tests in which no peer falls silent: a busy machine may stand still for seconds."""
PATIENCE_S = 20.0
SOURCES, TARGETS = (9, 4, 5), (3, 1, 2)
RECEIVED = ["receiving", "committed"]
FAILED = ["receiving", "failed", "writer_stopped"]


def logged(caplog: Any) -> str:
    """Events with their fields, a line each."""
    return "\n".join(f"{each.getMessage()} {getattr(each, 'fields', {})}" for each in caplog.records)


async def until(condition: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """Returns once the condition holds, which another thread, process or the kernel makes true without notice."""
    async with asyncio.timeout(patience_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def held_back(work: Awaitable[Any], seconds: float) -> bool:
    """Whether `work` is still under way after this time."""
    done, _ = await asyncio.wait({asyncio.ensure_future(work)}, timeout=seconds)
    return not done


def refs_of(blocks: Sequence[int], generation: int = 7) -> BlockRefs:
    return BlockRefs(np.array(blocks, np.uint32), np.full(len(blocks), generation, np.uint64))


@dataclass
class Recorder:
    """A listener that notes its calls and checks their order."""

    calls: list[str] = field(default_factory=list)
    payload: bytes | None = None
    error: TransferError | None = None
    refuse_with: TransferError | None = None
    breaks_at_commit: bool = False
    """Whether a failure may follow the commit, as it does if `on_committed` raises."""
    patience_s: float = PATIENCE_S
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
        assert self.calls in ([], ["receiving"], *([RECEIVED] if self.breaks_at_commit else []))
        self.error = error
        self._add("failed")

    def on_writer_stopped(self) -> None:
        assert self.calls[-1:] == ["failed"]
        self._add("writer_stopped")

    async def until(self, call: str) -> None:
        async with asyncio.timeout(self.patience_s):
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
    clock: Clock

    def offer(
        self, listener: Any, blocks: Sequence[int] = TARGETS, expires_in_s: float = 60.0, first_block: int = 0
    ) -> Offer:
        return self.receiver.offer(refs_of(blocks), listener, expires_in_s, first_block)

    async def open(self, offer: Offer, timeout_s: float = 60.0) -> Any:
        return await self.sender.open(offer.ticket, offer.endpoint, timeout_s)

    async def begin(self, listener: Any, blocks: Sequence[int] = TARGETS) -> Any:
        return await self.open(self.offer(listener, blocks))

    async def hand_over(
        self, listener: Any, targets: Sequence[int] = TARGETS, sources: Sequence[int] = SOURCES, payload: bytes = b""
    ) -> TransferReport:
        """One whole hand-off, after which every byte is compared."""
        report = await push_and_commit(await self.begin(listener, targets), sources[: len(targets)], payload)
        assert listener.calls == RECEIVED
        assert self.landed(sources[: len(targets)], targets)
        return report

    def landed(self, sources: Sequence[int] = SOURCES, targets: Sequence[int] = TARGETS) -> bool:
        return torch.equal(self.source.blocks[list(sources)], self.target.blocks[list(targets)])


async def push_and_commit(handoff: Handoff, sources: Sequence[int] = SOURCES, payload: bytes = b"") -> TransferReport:
    await handoff.push(handoff.first_block, tuple(map(BlockId, sources)))
    return await handoff.commit(payload)


def rerouted(offer: Offer, transport: str, **fields: str) -> Offer:
    """The offer, whose endpoint says these fields of one transport, and no longer what it said there."""
    known = Endpoint.decode(offer.endpoint)
    reach = known.reach | {transport: {**known.reach[transport], **fields}}
    return replace(offer, endpoint=replace(known, reach=reach).encode())


@asynccontextmanager
async def ends(
    source: TestPool,
    target: TestPool,
    sending: str,
    receiving: tuple[str, ...],
    timing: Timing = PATIENT,
    *,
    prints: Fingerprints = PRINTS,
    clock: Clock | None = None,
    sender: Any = None,
    receiver: Any = None,
    closes: bool = True,
) -> AsyncIterator[Pair]:
    """A started pair; `sender`, `receiver`: more arguments of either; `closes`: whether the pools are closed too."""
    clock = clock or ManualClock()
    there = KvReceiver(target.memory, prints, clock, receiving, "127.0.0.1", timing=timing, **(receiver or {}))
    here = KvSender(source.memory, prints, clock, sending, timing=timing, **(sender or {}))
    await there.start()
    try:
        yield Pair(source, target, there, here, clock)
        there.check_invariants()
    finally:
        await here.stop()
        await there.stop()
        for pool in (source, target) if closes else ():
            pool.close()


def paired(transport: str, timing: Timing = PATIENT, offered: tuple[str, ...] | None = None) -> Any:
    """`async with paired("shm") as pair`: a connected sender and receiver; "auto": of what two on one host have."""
    spoken = transport if transport == "auto" else transport_of(transport)
    names = offered or (("shm", "tcp") if transport == "auto" else (spoken,))
    return ends(make_pool(transport), make_pool(transport), spoken, names, timing)
