"""The receiving half of a decode worker: a shared pool, its endpoint, and listeners that move blocks as they should."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from engine.block_pool import BlockPool
from engine.kv_cache import KvCache
from kvtransfer.base import BlockRef, Fingerprints, Offer, PoolMemory
from kvtransfer.receiver import KvReceiver
from shell.clock import MonotonicClock
from tandem.errors import TransferError
from tandem.first_tokens import decode_first_tokens
from tandem.kv_layout import KvLayout
from tandem.lifecycle import BlockState
from tandem.types import BlockId, TokenId, new_incarnation

CPU = torch.device("cpu")
NUM_BLOCKS = 128
DEADLINE_S = 60.0


class Arrivals:
    """What has been said so far, with a way to wait for more."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def note(self) -> None:
        self._changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


@dataclass
class ReceivedOffer:
    """A decode worker's listener for one offer: moves blocks as the contract says."""

    pool: BlockPool
    blocks: tuple[BlockId, ...]
    arrivals: Arrivals
    offer: Offer = field(init=False)
    first_tokens: Mapping[int, TokenId] | None = None
    error: TransferError | None = None

    def on_receiving(self) -> None:
        self.pool.start_receiving(self.blocks)

    def on_committed(self, first_token_payload: bytes) -> None:
        self.pool.seal(self.blocks)
        self.first_tokens = decode_first_tokens(first_token_payload)
        self.arrivals.note()

    def on_failed(self, error: TransferError) -> None:
        self.error = error
        self.pool.release(self.blocks)
        self.arrivals.note()

    def on_writer_stopped(self) -> None:
        if all(self.pool.state(block) is BlockState.QUARANTINED for block in self.blocks):
            self.pool.writer_stopped(self.blocks)
        self.arrivals.note()


class Target:
    """The receiving half of a decode worker: a shared pool and its endpoint."""

    def __init__(self, layout: KvLayout, fingerprint: str) -> None:
        self._layout = layout
        self.cache = KvCache.create(layout, NUM_BLOCKS, CPU, shared=True)
        self.cache.fill_poison()
        self.pool = BlockPool(NUM_BLOCKS, layout.block_size)
        self.arrivals = Arrivals()
        memory = PoolMemory(self.cache.blocks_view, self.cache.shared_fd, new_incarnation())
        prints = Fingerprints(fingerprint, layout)
        self.receiver = KvReceiver(memory, prints, MonotonicClock(), ("shm", "tcp"), "127.0.0.1")

    def reserve(self, num_tokens: int, first_block: int = 0) -> ReceivedOffer:
        blocks = self.pool.allocate(self._layout.blocks_for(num_tokens) - first_block, BlockState.RESERVED)
        landing = ReceivedOffer(self.pool, blocks, self.arrivals)
        refs = tuple(BlockRef(block, int(self.pool.generations((block,))[0])) for block in blocks)
        landing.offer = self.receiver.offer(refs, landing, expires_in_s=60.0, first_block=first_block)
        return landing

    def block_bytes(self, landing: ReceivedOffer) -> bytes:
        return self.cache.blocks_view[list(landing.blocks)].numpy().tobytes()

    def let_go(self, landing: ReceivedOffer) -> None:
        if landing.first_tokens is not None:
            self.pool.release(landing.blocks)
