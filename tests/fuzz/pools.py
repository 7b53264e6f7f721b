"""The pools that `tests.fuzz.transfer` hands over between, as each transport needs them."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from engine.pool_memory import PoolAllocation
from kvtransfer.base import DeviceMemory, Fingerprints, PoolMemory
from kvtransfer.transports import cuda_ipc, nccl
from tandem.kv_layout import DType, KvLayout
from tandem.types import new_incarnation

NUM_BLOCKS = 16
PRINTS = Fingerprints("fuzz", KvLayout(2, 1, 4, 8, DType.BFLOAT16))
_BETWEEN_GPUS = (cuda_ipc.NAME, nccl.NAME)

MakeMemory = Callable[[], contextlib.AbstractContextManager[PoolMemory]]


def memory_for(transport: str) -> MakeMemory:
    """What makes a pool that this transport reaches."""
    return _device_memory if transport in _BETWEEN_GPUS else _host_memory


@contextmanager
def _host_memory() -> Iterator[PoolMemory]:
    """A pool in shared host memory."""
    size = NUM_BLOCKS * PRINTS.layout.block_bytes
    fd = os.memfd_create("tandem-fuzz")
    try:
        os.ftruncate(fd, size)
        blocks = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8).view(NUM_BLOCKS, -1)
        yield PoolMemory(blocks, fd, new_incarnation())
    finally:
        os.close(fd)


@contextmanager
def _device_memory() -> Iterator[PoolMemory]:
    """A pool on the first GPU, or on the stand-in's, that peers may map."""
    num_bytes = NUM_BLOCKS * PRINTS.layout.block_bytes
    with contextlib.closing(PoolAllocation.allocate(num_bytes, torch.device("cuda", 0), shared=True)) as allocation:
        blocks = allocation.bytes.view(NUM_BLOCKS, -1)
        device = DeviceMemory(blocks, allocation.shared_fd, allocation.size_bytes)
        yield PoolMemory(torch.zeros(blocks.shape, dtype=torch.uint8), None, new_incarnation(), device=device)
