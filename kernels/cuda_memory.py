"""Memory of a GPU that processes share: allocated by one, mapped by others through a file descriptor.

The memory lives while anybody has it mapped or holds a descriptor of it. A process that dies lets go of both: nothing
is left behind, and mappings in other processes stay valid.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any, Final

import torch

from kernels.cuda_driver import CudaDriver


class DeviceRange:
    """Addresses with an allocation behind them, open to one device. `close` takes both away."""

    def __init__(self, driver: CudaDriver, device: int, handle: int, size_bytes: int) -> None:
        """Maps `handle`, which stays the caller's; `size_bytes` is the whole allocation. Raises CudaError."""
        self._driver = driver
        self.size_bytes: Final = size_bytes
        with ExitStack() as undo:
            self.address: Final = driver.address_reserve(size_bytes)
            undo.callback(driver.address_free, self.address, size_bytes)
            driver.memory_map(self.address, size_bytes, handle)
            undo.callback(driver.memory_unmap, self.address, size_bytes)
            driver.memory_allow(self.address, size_bytes, device)
            self._undo = undo.pop_all()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """`[size_bytes]` uint8, in the form of numba's "CUDA Array Interface", version 3, which torch reads."""
        return {"shape": (self.size_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def close(self) -> None:
        """Nothing that uses the addresses may be running. Idempotent. Raises CudaError."""
        self._undo.close()


class SharedAllocation:
    """Memory of this process on one device, and the descriptor by which others map it. `close` ends both."""

    def __init__(self, driver: CudaDriver, device: int, num_bytes: int) -> None:
        """Allocates `num_bytes` at least. Raises CudaError; then nothing is left behind."""
        granule = driver.granularity(device)
        size_bytes = -(-num_bytes // granule) * granule
        with ExitStack() as undo:
            handle = driver.memory_create(device, size_bytes)
            try:
                self.descriptor: Final = driver.memory_export(handle)
                undo.callback(os.close, self.descriptor)
                self.range: Final = DeviceRange(driver, device, handle, size_bytes)
                undo.callback(self.range.close)
            finally:
                driver.memory_release(handle)  # descriptor and mapping keep the memory
            self._undo = undo.pop_all()

    def tensor(self, device: torch.device) -> torch.Tensor:
        """`[size_bytes]` uint8 on `device`: a view, valid until `close`."""
        return torch.as_tensor(self.range, device=device)

    def close(self) -> None:
        """Frees the memory. No work on the device may use the memory afterwards. Idempotent. Raises CudaError."""
        self._undo.close()


def map_shared(driver: CudaDriver, device: int, descriptor: int, size_bytes: int) -> DeviceRange:
    """Another process's allocation, open to `device`; the descriptor stays the caller's. Raises CudaError."""
    handle = driver.memory_import(descriptor)
    try:
        return DeviceRange(driver, device, handle, size_bytes)
    finally:
        driver.memory_release(handle)
