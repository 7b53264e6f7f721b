"""Host memory for KV blocks: private or in a memory file that peers may map, pinned for a GPU's copies on request.

Owns the bytes, the descriptor behind them and their registration with the CUDA driver.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import tempfile
from typing import Any

import torch


class HostMemory:
    """Made by `allocate`; its content is undefined until written. `close` ends it."""

    def __init__(self, memory: torch.Tensor, shared_fd: int | None) -> None:
        """Takes over `memory`, `[size_bytes]` uint8, and the descriptor behind it."""
        self._bytes: torch.Tensor | None = memory
        self.shared_fd = shared_fd
        """Descriptor of the memory file, owned here; None if it is private."""
        self._is_pinned = False

    @classmethod
    def allocate(cls, size_bytes: int, *, shared: bool) -> HostMemory:
        """Raises OSError or RuntimeError (torch) where there is not so much."""
        if not shared:
            return cls(torch.empty(size_bytes, dtype=torch.uint8), None)
        fd = _open_memory_file(size_bytes)
        return cls(_map(fd, size_bytes), fd)

    @property
    def bytes(self) -> torch.Tensor:
        """`[size_bytes]` uint8; a view, valid until `close`."""
        if self._bytes is None:
            raise ValueError("the KV cache is closed")
        return self._bytes

    def pin(self) -> bool:
        """Locks the pages so that GPUs copy them directly; False where the driver refuses, and copies are slower.

        Not torch's own pinned memory: that is rounded up to a power of two, and cannot be a memory file.
        """
        status = _cudart().cudaHostRegister(self.bytes.data_ptr(), self.bytes.numel(), 0)
        self._is_pinned = int(status) == 0
        if not self._is_pinned:
            with contextlib.suppress(RuntimeError):  # else the next launch would report the refusal as its own error
                torch.zeros(1, device="cuda")
        return self._is_pinned

    def close(self) -> None:
        """Gives memory and descriptor back; no copy may be running. Idempotent.

        The mapping goes with its last view: unmapping under a view that somebody still holds
        would turn a late read into a crash.
        """
        if self._is_pinned:
            _cudart().cudaHostUnregister(self.bytes.data_ptr())
            self._is_pinned = False
        self._bytes = None
        if self.shared_fd is not None:
            os.close(self.shared_fd)
            self.shared_fd = None


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _open_memory_file(size_bytes: int) -> int:
    """A memory file of fixed size: a peer that maps it can never be struck by its shrinking."""
    if not hasattr(os, "memfd_create"):  # not Linux: an unlinked file serves the same end, unsealed
        with tempfile.TemporaryFile() as file:
            os.ftruncate(file.fileno(), size_bytes)
            return os.dup(file.fileno())
    fd = os.memfd_create("tandem-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


def _map(fd: int, size_bytes: int) -> torch.Tensor:
    """Returns `[size_bytes]` uint8 over the file; the tensor keeps the mapping alive."""
    try:
        return torch.frombuffer(mmap.mmap(fd, size_bytes), dtype=torch.uint8)
    except OSError:
        os.close(fd)
        raise
