"""The stand-in for the CUDA driver as tests use it: pools on its "GPU", its settings, and what is still alive in it."""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partialmethod

import torch

from engine.loading import EngineRole
from engine.pool_memory import PoolAllocation
from kernels.cuda_driver import CudaDriver
from kernels.cuda_memory import DeviceRange, SharedAllocation
from kvtransfer.base import DeviceMemory, PoolMemory
from kvtransfer.transports import TRANSPORTS
from kvtransfer.transports.cuda_ipc import CudaIpcTransport
from tandem.types import Incarnation
from tests.standins.build import built

KINDS = ("handles", "ranges", "mappings", "streams", "events", "contexts")
THIS_GPU, OTHER_GPU = "000102030405060708090a0b0c0d0e0f", "ff0102030405060708090a0b0c0d0e0f"


class StandInCuda:
    """The library of this process; settings hold for all who use it."""

    def __init__(self) -> None:
        """Skips the test where it cannot be built."""
        path = str(built("libcuda"))
        self._library = ctypes.CDLL(path)
        self.driver = CudaDriver(path)

    def set(self, name: str, value: object) -> None:
        """One of the settings that the head of libcuda.c lists."""
        self._library.standin_cuda_set(name.encode(), str(value).encode())

    def reset(self) -> None:
        """Every setting as it is at first."""
        for name in ("NO_PEER", "NO_SHARING", "DELAY_US"):
            self.set(name, 0)
        for name, value in (("HOLD", ""), ("FAIL", ""), ("DEVICES", THIS_GPU), ("MEMORY", 1 << 40)):
            self.set(name, value)

    def live(self) -> Mapping[str, int]:
        """How many of each kind exist."""
        return {kind: self._library.standin_cuda_live(kind.encode()) for kind in KINDS}


@cache
def standin() -> StandInCuda:
    """The one of this process, from now on the driver of its cuda_ipc."""
    cuda = StandInCuda()
    for transport in TRANSPORTS:
        if isinstance(transport, CudaIpcTransport):
            transport._driver = lambda: cuda.driver
    return cuda


class DevicePool:
    """A pool of random bytes on the stand-in's GPU, with rows in host memory beside it that nothing may touch."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self._allocation = SharedAllocation(standin().driver, 0, num_blocks * block_bytes)
        self.blocks = tensor_over(self._allocation.range)[: num_blocks * block_bytes].view(num_blocks, block_bytes)
        self.blocks.copy_(torch.randint(0, 256, self.blocks.shape, dtype=torch.uint8))
        device = DeviceMemory(self.blocks, self._allocation.descriptor, self._allocation.range.size_bytes)
        self.memory = PoolMemory(torch.zeros_like(self.blocks), None, Incarnation(secrets.token_hex(16)), device=device)

    def close(self) -> None:
        self._allocation.close()


def pools_lie_here() -> None:
    """From now on this process's engines have their pools on the stand-in's GPU, and cuda_ipc works for them."""
    driver = standin().driver

    def allocate(num_bytes: int, device: torch.device, *, shared: bool) -> PoolAllocation:
        allocation = SharedAllocation(driver, 0, num_bytes)
        return PoolAllocation(tensor_over(allocation.range)[:num_bytes], allocation if shared else None)

    PoolAllocation.allocate = allocate  # type: ignore[method-assign,assignment]
    EngineRole.__init__ = partialmethod(EngineRole.__init__, staged_kv=True)  # type: ignore[method-assign,assignment]
    probe = CudaIpcTransport.probe
    CudaIpcTransport.probe = lambda self, _: probe(self, torch.device("cuda", 0))  # type: ignore[method-assign]


def tensor_over(memory: DeviceRange) -> torch.Tensor:
    """`[size_bytes]` uint8: the stand-in's device addresses are this process's own."""
    return torch.frombuffer((ctypes.c_uint8 * memory.size_bytes).from_address(memory.address), dtype=torch.uint8)


@contextmanager
def fresh() -> Iterator[StandInCuda]:
    """The stand-in with its first settings; nothing that was made within may be left alive in it at the end."""
    cuda = standin()
    cuda.reset()
    before = cuda.live()
    try:
        yield cuda
    finally:
        cuda.reset()
    assert cuda.live() == before
