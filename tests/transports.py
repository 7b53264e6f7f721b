"""Every transport as tests use it on this machine: one entry in `WAYS` makes it join all tests of the hand-off.

An entry says how to make a pool that the transport can use, and how a process gets ready for it (a stand-in library,
say). Tests take their names from `EVERY`: one that cannot run here is skipped and tells why.
"""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import pytest
import torch

from kvtransfer import nixl_agent
from kvtransfer.base import Fingerprints, PoolMemory
from kvtransfer.rows import Rows
from shell.thread_work import to_the_end
from tandem.errors import TransferError
from tandem.kv_layout import DType, KvLayout
from tandem.types import BlockId, Incarnation
from tests import nixl_param
from tests.standins.build import obstacle
from tests.standins.cuda import DevicePool
from tests.standins.nccl import NcclPool

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, block_size=4, head_dim=8, dtype=DType.BFLOAT16)
PRINTS = Fingerprints(model="model-a", layout=LAYOUT)
NUM_BLOCKS = 16
RING_ROWS = 64
"""Enough for 16 senders that write by themselves."""


class TestPool(Protocol):
    """A pool of random bytes, as an engine would own it."""

    __test__ = False
    blocks: torch.Tensor
    """`[N, block_bytes]` uint8, readable and writable by the test: where the pool itself lies."""
    memory: PoolMemory

    def close(self) -> None:
        """Gives everything back; nothing of it may be in use."""


class SharedPool:
    """In a memfd."""

    def __init__(self, num_blocks: int = NUM_BLOCKS, block_bytes: int = LAYOUT.block_bytes) -> None:
        self.fd = os.memfd_create("test-pool")
        size = num_blocks * block_bytes
        os.ftruncate(self.fd, size)
        self._mapping = mmap.mmap(self.fd, size)
        self.blocks = torch.frombuffer(self._mapping, dtype=torch.uint8).view(num_blocks, block_bytes)
        self.blocks.copy_(torch.randint(0, 256, self.blocks.shape, dtype=torch.uint8))
        self.memory = PoolMemory(self.blocks, self.fd, Incarnation(secrets.token_hex(16)))

    def close(self) -> None:
        del self.memory, self.blocks
        try:
            self._mapping.close()
        except BufferError:  # a view of it is in a cycle of garbage; to collect takes long with everything loaded
            gc.collect()
            self._mapping.close()
        os.close(self.fd)


class CopiedStaging:
    """A pool beside the rows that its blocks pass through; a copy waits for its gate, and may break."""

    def __init__(self, blocks: torch.Tensor) -> None:
        self.num_blocks = len(blocks)
        self._blocks = Rows(blocks.numpy())
        self.begun, self.gate = asyncio.Event(), asyncio.Event()
        self.gate.set()
        self.error: TransferError | None = None
        self.on_copied: Callable[[], None] = _is_ready

    async def copy_out(self, block_ids: Sequence[BlockId], into: Rows, rows: Sequence[int]) -> None:
        copy = self._copy(self._blocks, tuple(block_ids), into, tuple(rows))
        await to_the_end(asyncio.ensure_future(copy))

    async def copy_in(self, source: Rows, rows: Sequence[int], block_ids: Sequence[BlockId]) -> None:
        copy = self._copy(source, tuple(rows), self._blocks, tuple(block_ids))
        await to_the_end(asyncio.ensure_future(copy))

    async def _copy(self, source: Rows, sources: Sequence[int], target: Rows, targets: Sequence[int]) -> None:
        self.begun.set()
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        source.copy_to(target, sources, targets)
        self.on_copied()


class StagedPool:
    """In this process's own memory, behind a ring in a memfd."""

    def __init__(
        self, num_blocks: int = NUM_BLOCKS, block_bytes: int = LAYOUT.block_bytes, ring_rows: int = RING_ROWS
    ) -> None:
        self._ring = SharedPool(ring_rows, block_bytes)
        self.blocks = torch.randint(0, 256, (num_blocks, block_bytes), dtype=torch.uint8)
        self.staging = CopiedStaging(self.blocks)
        self.memory = replace(self._ring.memory, staging=self.staging)

    def close(self) -> None:
        del self.memory
        self._ring.close()


def _is_ready() -> None:
    """Nothing to prepare."""


@dataclass(frozen=True, slots=True)
class Way:
    """How tests use one transport."""

    peer_writes: bool
    """Whether its sender writes into the pool by itself, so that it has to prove that it stopped."""
    fences: bool = False
    """Whether the receiver ends a lost sender's access by itself, so that this needs no proof of its end."""
    staged: bool = True
    """Whether it moves rows of host memory, so that those can stand for a pool elsewhere."""
    transport: str = ""
    """Its name, where that is not the way's own."""
    make_pool: Callable[..., TestPool] = SharedPool
    """`(num_blocks, block_bytes)`, both with defaults."""
    prepare: Callable[[], None] = _is_ready
    """Called in each process before a pool is made; may be called again."""
    why_not: str | None = None
    """Why it cannot run on this machine; None = it can."""


def _load_nixl() -> None:
    """Before a peer waits for it, as in a worker."""
    nixl_agent.load()


def _device_pool(num_blocks: int = NUM_BLOCKS, block_bytes: int = LAYOUT.block_bytes) -> TestPool:
    return DevicePool(num_blocks, block_bytes)


def _nccl_pool(num_blocks: int = NUM_BLOCKS, block_bytes: int = LAYOUT.block_bytes) -> TestPool:
    return NcclPool(num_blocks, block_bytes)


WAYS: Mapping[str, Way] = {
    "shm": Way(peer_writes=True),
    "tcp": Way(peer_writes=False),
    "nixl": Way(peer_writes=True, fences=True, staged=False, prepare=_load_nixl, why_not=nixl_param.WHY_NOT),
    "cuda_ipc": Way(True, staged=False, make_pool=_device_pool, why_not=obstacle()),
    "nccl": Way(False, staged=False, make_pool=_nccl_pool, why_not=obstacle()),
}
"""By name; each is one of `kvtransfer.transports.TRANSPORTS`."""
RINGS: Mapping[str, Way] = {
    f"{name} through rings": replace(way, staged=False, transport=name, make_pool=StagedPool)
    for name, way in WAYS.items()
    if way.staged
}
"""The same transports between pools that they do not reach."""


def _listed(names: Mapping[str, Way]) -> list[Any]:
    return [
        pytest.param(name, marks=pytest.mark.skipif(way.why_not is not None, reason=f"{name}: {way.why_not}"))
        for name, way in names.items()
    ]


EVERY = _listed(WAYS)
"""For `@pytest.mark.parametrize("transport", EVERY)`."""
EVERY_AND_RINGS = [*EVERY, *_listed(RINGS)]
"""For tests that take the way of `way_of`."""
USABLE = tuple(name for name, way in WAYS.items() if way.why_not is None)
"""For tests that wait once for all of them; `telling` says which one failed."""
USABLE_AND_RINGS = (*USABLE, *(name for name, way in RINGS.items() if way.why_not is None))
PEER_WRITES = _listed({name: way for name, way in WAYS.items() if way.peer_writes})
"""Those whose sender writes into the pool by itself."""


def make_pool(transport: str, *args: int) -> TestPool:
    """A pool for this transport (`auto`: for any on one host)."""
    way = way_of(transport) if transport != "auto" else WAYS["shm"]
    way.prepare()
    return way.make_pool(*args)


def way_of(name: str) -> Way:
    """Of `WAYS` and `RINGS`."""
    return WAYS.get(name) or RINGS[name]


def transport_of(name: str) -> str:
    """What `--transport` calls it."""
    return way_of(name).transport or name


@contextmanager
def telling(transport: str) -> Iterator[None]:
    """What fails within is told with the transport."""
    try:
        yield
    except Exception as error:
        error.add_note(f"over {transport}")
        raise
