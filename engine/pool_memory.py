"""The memory of a pool on its GPU: torch's own, or an allocation that other processes of this machine may map."""

from __future__ import annotations

import contextlib
from typing import Final

import torch

from engine.device import synchronize
from kernels.cuda_driver import CudaDriver, CudaError
from kernels.cuda_memory import SharedAllocation


class PoolAllocation:
    """Made by `allocate`; its content is undefined until written. `close` ends the allocation."""

    def __init__(self, memory: torch.Tensor, shared: SharedAllocation | None) -> None:
        """Takes over `memory`, `[num_bytes]` uint8, which lies at the beginning of `shared`; None = it is torch's."""
        self.bytes = memory
        """`[num_bytes]` uint8; a view, valid until `close`."""
        self.size_bytes: Final = len(memory) if shared is None else shared.range.size_bytes
        """Size of the whole allocation."""
        self._shared = shared

    @classmethod
    def allocate(cls, num_bytes: int, device: torch.device, *, shared: bool) -> PoolAllocation:
        """Raises RuntimeError (torch's, or the driver's) where there is not so much."""
        if not shared:
            return cls(torch.empty(num_bytes, dtype=torch.uint8, device=device), None)
        torch.cuda.synchronize(device)  # the context that the memory is used in is there
        allocation = SharedAllocation(CudaDriver(), device.index or 0, num_bytes)
        return cls(allocation.tensor(device)[:num_bytes], allocation)

    @property
    def shared_fd(self) -> int | None:
        """Descriptor of the allocation, owned here; None if nobody may map this memory."""
        return None if self._shared is None else self._shared.descriptor

    def close(self) -> None:
        """Waits for whatever runs on the device: a step that failed may have left work behind. Idempotent."""
        synchronize(self.bytes.device)
        self.bytes = torch.empty(0, dtype=torch.uint8)
        if self._shared is not None:
            with contextlib.suppress(CudaError):  # a lost device: the process's end gives it back
                self._shared.close()
            self._shared = None
