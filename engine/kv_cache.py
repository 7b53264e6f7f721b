"""The tensor that holds every KV block of a pool, on a device or in shared memory.

Owns memory, its file descriptor and registration with the CUDA driver, and the ring of rows in host memory through
which blocks of a pool on a device pass where transports reach nothing else. Knows nothing of who holds which block.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import tempfile
from typing import Any, Final

import torch

from engine.device import synchronize
from engine.memory import MIN_RING_ROWS
from engine.numa import bind_near
from engine.pool_memory import PoolAllocation
from engine.pool_staging import PoolStaging
from models.dtypes import torch_dtype
from shell.telemetry.logging import get_logger
from tandem.errors import ConfigError
from tandem.kv_layout import KvLayout

_log = get_logger(__name__)


class HostMemory:
    """Private, or in a memory file that peers may map; pinned for a GPU's copies on request.

    Made by `allocate`; its content is undefined until written. `close` ends it.
    """

    def __init__(self, memory: torch.Tensor, shared_fd: int | None) -> None:
        """Takes over `memory`, `[size_bytes]` uint8, and the descriptor of its file."""
        self._bytes: torch.Tensor | None = memory
        self.shared_fd = shared_fd
        """Descriptor of the memory file, owned here; None if the memory is private."""
        self._pinned_for: torch.device | None = None

    @classmethod
    def allocate(cls, size_bytes: int, *, shared: bool) -> HostMemory:
        """Raises OSError or RuntimeError (torch) where there is not so much."""
        if not shared:
            return cls(_private_memory(size_bytes), None)
        return cls.mapped(_open_memory_file(size_bytes))

    @classmethod
    def mapped(cls, shared_fd: int) -> HostMemory:
        """Maps a memory file of another process and takes its descriptor over. Raises OSError; then closes that."""
        try:
            mapping = mmap.mmap(shared_fd, os.fstat(shared_fd).st_size)
        except OSError:
            os.close(shared_fd)
            raise
        return cls(torch.frombuffer(mapping, dtype=torch.uint8), shared_fd)  # it keeps the mapping alive

    @property
    def bytes(self) -> torch.Tensor:
        """`[size_bytes]` uint8; a view, valid until `close`."""
        if self._bytes is None:
            raise ValueError("the KV cache is closed")
        return self._bytes

    def pin(self, device: torch.device) -> bool:
        """Locks the pages so that `device` copies them directly; False where the driver refuses, and copies are slower.

        On that device alone: on another one the calling thread would begin a context, and take memory there. Not
        torch's own pinned memory: that is rounded up to a power of two, and cannot be a memory file.
        """
        with torch.cuda.device(device):
            status = _cudart().cudaHostRegister(self.bytes.data_ptr(), self.bytes.numel(), 0)
            if int(status) == 0:
                self._pinned_for = device
                return True
            with contextlib.suppress(RuntimeError):  # else the next launch would report the refusal as its own error
                torch.zeros(1, device=device)
        return False

    def close(self) -> None:
        """Gives memory and descriptor back, once no copy of its device runs. Idempotent.

        The mapping goes with its last view: unmapping under a view that somebody still holds would turn a late read
        into a crash.
        """
        if self._pinned_for is not None:
            synchronize(self._pinned_for)
            with torch.cuda.device(self._pinned_for):
                _cudart().cudaHostUnregister(self.bytes.data_ptr())
            self._pinned_for = None
        self._bytes = None
        if self.shared_fd is not None:
            os.close(self.shared_fd)
            self.shared_fd = None


class KvCache:
    """Made by `create`; its content is undefined until written. `close` ends the cache."""

    def __init__(self, layout: KvLayout, host: HostMemory, allocation: PoolAllocation | None) -> None:
        """Takes over the ring `host`, and the pool `[N * block_bytes]`; None = `host` is the pool itself."""
        self.layout: Final = layout
        """Shape and dtype of a block."""
        self._host = host
        self.allocation: Final = allocation
        """The pool's own memory, where it does not lie in host memory; owned by this cache."""
        self._bytes: torch.Tensor | None = host.bytes if allocation is None else allocation.bytes
        self.num_blocks: Final = len(self.blocks_view)
        """N."""
        self.staging: Final = None if allocation is None else PoolStaging(self.blocks_view)
        """Copies between the pool and rows of host memory; None where it lies there itself."""

    @classmethod
    def create(
        cls,
        layout: KvLayout,
        num_blocks: int,
        device: torch.device,
        *,
        shared: bool = False,
        ring_rows: int = 0,
        device_shared: bool = False,
    ) -> KvCache:
        """Allocates N blocks; `shared` puts what transports reach into a sealed memory file that peers may map.

        `device_shared` lets peers map a pool on a GPU too. That has a ring of at least MIN_RING_ROWS rows in host
        memory, one on a CPU only if it is asked for. Raises ConfigError if there is not so much memory.
        """
        size_bytes = num_blocks * layout.block_bytes
        if device.type != "cpu":
            ring_rows = max(ring_rows, MIN_RING_ROWS)
        host_bytes = ring_rows * layout.block_bytes or size_bytes
        pool = None
        try:
            pool = PoolAllocation.allocate(size_bytes, device, shared=device_shared) if ring_rows else None
            host = HostMemory.allocate(host_bytes, shared=shared)
        except (OSError, RuntimeError) as error:  # torch and the driver report exhausted memory as RuntimeError
            if pool is not None:
                pool.close()
            raise ConfigError("--kv-memory", f"{size_bytes} bytes of KV on {device}: {error}") from error
        if device.type == "cuda":
            bind_near(host.bytes, device)
            if not host.pin(device):
                _log.warning("host ring is not pinned, hand-offs are slower", size_bytes=host_bytes)
        return cls(layout, host, pool)

    @classmethod
    def mapped(cls, layout: KvLayout, shared_fd: int) -> KvCache:
        """Maps the pool of another process: the part of one rank, whose `layout` is `KvLayout.part`'s.

        Takes the descriptor over. Raises OSError.
        """
        return cls(layout, HostMemory.mapped(shared_fd), None)

    @property
    def tensor(self) -> torch.Tensor:
        """`[N, L, 2, Hkv, S, D]` of the layout's dtype, head-major in memory; a view, valid until `close`.

        Where KV is quantised, the scales lie between the `[S, D]` of one head, layer and side and the next.
        """
        num_layers, sides, num_heads, block_size, head_dim = self.layout.block_shape
        elements = self.blocks_view.view(torch_dtype(self.layout.dtype))
        outer = (self.num_blocks, num_heads, num_layers, sides)
        rows = elements.view(*outer, -1)[..., : block_size * head_dim]
        return rows.view(*outer, block_size, head_dim).permute(0, 2, 3, 1, 4, 5)

    @property
    def blocks_view(self) -> torch.Tensor:
        """`[N, block_bytes]` uint8; a view of the same bytes."""
        if self._bytes is None:
            raise ValueError("the KV cache is closed")
        return self._bytes.view(-1, self.layout.block_bytes)

    @property
    def host_rows(self) -> torch.Tensor:
        """`[R, block_bytes]` uint8 in host memory, what transports reach: the pool itself or its ring."""
        return self._host.bytes.view(-1, self.layout.block_bytes)

    @property
    def shared_fd(self) -> int | None:
        """Descriptor of the memory file that `host_rows` lie in, owned by this cache; None if it is not shared."""
        return self._host.shared_fd

    def fill_poison(self) -> None:
        """Writes NaN everywhere, ring included, so that a test catches whoever reads a slot never written."""
        for rows in (self.blocks_view, self.host_rows):
            rows.fill_(0xFF)  # all bits set is NaN in every float format, so in scales too

    def close(self) -> None:
        """Gives memory and descriptor back, after copies under way. Idempotent."""
        if self.staging is not None:
            self.staging.close()
        self._bytes = None
        if self.allocation is not None:
            self.allocation.close()
        self._host.close()


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _private_memory(size_bytes: int) -> torch.Tensor:
    """In huge pages where the system has them: attention reads blocks from all over a pool."""
    mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system built without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)  # it keeps the mapping alive


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
