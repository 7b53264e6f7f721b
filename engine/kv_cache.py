"""The tensor that holds every KV block of a pool, on a device or in shared memory.

Owns memory, its file descriptor and registration with the CUDA driver, and the mirror in host memory
that stands for a pool that transports cannot reach. Knows nothing of who holds which block.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import tempfile
from typing import Any, Final

import torch

from engine.mirror import PoolMirror
from models.dtypes import torch_dtype
from tandem.errors import ConfigError
from tandem.kv_layout import KvLayout
from tandem.telemetry.logging import get_logger

_log = get_logger(__name__)


class HostMemory:
    """Private, or in a memory file that peers may map; pinned for a GPU's copies on request.

    Made by `allocate`; its content is undefined until written. `close` ends it.
    """

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
        try:
            return cls(torch.frombuffer(mmap.mmap(fd, size_bytes), dtype=torch.uint8), fd)  # it keeps the mapping alive
        except OSError:
            os.close(fd)
            raise

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


class KvCache:
    """Made by `create`; its content is undefined until written. `close` ends it."""

    def __init__(self, layout: KvLayout, host: HostMemory, device_bytes: torch.Tensor | None) -> None:
        """Takes over `host`, and the pool `[N * block_bytes]` uint8 that it mirrors; None = it is the pool itself."""
        self.layout: Final = layout
        """Shape and dtype of one block."""
        self.num_blocks: Final = len(host.bytes) // layout.block_bytes
        """N."""
        self._host = host
        self._bytes: torch.Tensor | None = host.bytes if device_bytes is None else device_bytes
        self.mirror: Final = None if device_bytes is None else PoolMirror(self.blocks_view, self.host_blocks)
        """Copies between the pool and `host_blocks`; None where they are the same."""

    @classmethod
    def create(
        cls,
        layout: KvLayout,
        num_blocks: int,
        device: torch.device,
        *,
        shared: bool = False,
        mirrored: bool = False,
    ) -> KvCache:
        """Allocates N blocks; `shared` puts what transports reach into a sealed memory file that peers may map.

        A pool that is not in host memory is mirrored there; `mirrored` asks for it on a CPU too.
        Raises ConfigError if there is not so much memory.
        """
        size_bytes = num_blocks * layout.block_bytes
        mirrored = mirrored or device.type != "cpu"
        try:
            pool = torch.empty(size_bytes, dtype=torch.uint8, device=device) if mirrored else None
            host = HostMemory.allocate(size_bytes, shared=shared)
        except (OSError, RuntimeError) as error:  # torch reports exhausted memory as RuntimeError
            raise ConfigError("--kv-memory", f"{size_bytes} bytes of KV on {device}: {error}") from error
        if device.type == "cuda" and not host.pin():
            _log.warning("host mirror is not pinned, hand-offs are slower", size_bytes=size_bytes)
        return cls(layout, host, pool)

    @property
    def tensor(self) -> torch.Tensor:
        """`[N, L, 2, Hkv, S, D]` of the layout's dtype; a view, valid until `close`."""
        return self.blocks_view.view(torch_dtype(self.layout.dtype)).view(-1, *self.layout.block_shape)

    @property
    def blocks_view(self) -> torch.Tensor:
        """`[N, block_bytes]` uint8; a view of the same bytes."""
        if self._bytes is None:
            raise ValueError("the KV cache is closed")
        return self._bytes.view(-1, self.layout.block_bytes)

    @property
    def host_blocks(self) -> torch.Tensor:
        """`[N, block_bytes]` uint8 in host memory, what transports reach: the pool itself or its mirror."""
        return self._host.bytes.view(-1, self.layout.block_bytes)

    @property
    def shared_fd(self) -> int | None:
        """Descriptor of the memory file that `host_blocks` lie in, owned by this cache; None if it is not shared."""
        return self._host.shared_fd

    def fill_poison(self) -> None:
        """Writes NaN everywhere, mirror included, so that a test catches whoever reads a slot never written."""
        self.tensor.fill_(torch.nan)
        self.host_blocks.view(torch_dtype(self.layout.dtype)).fill_(torch.nan)

    def close(self) -> None:
        """Gives memory and descriptor back, after copies under way. Idempotent."""
        if self.mirror is not None:
            self.mirror.close()
        self._bytes = None
        self._host.close()


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
