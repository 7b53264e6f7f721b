"""The tensor that holds every KV block of a pool, on a device or in shared memory.

Owns memory and its file descriptor. Knows nothing of who holds which block.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile

import torch

from tandem.errors import ConfigError
from tandem.kv_layout import DType, KvLayout

TORCH_DTYPES = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16}


class KvCache:
    """Made by `create`; its content is undefined until written. `close` ends it."""

    def __init__(self, layout: KvLayout, memory: torch.Tensor, shared_fd: int | None) -> None:
        """Takes over `memory`, `[N * block_bytes]` uint8, and the descriptor behind it."""
        self._layout = layout
        self._bytes: torch.Tensor | None = memory
        self._shared_fd = shared_fd

    @classmethod
    def create(cls, layout: KvLayout, num_blocks: int, device: torch.device, *, shared: bool = False) -> KvCache:
        """Allocates N blocks; `shared` puts them into a sealed memory file that peers may map.

        Raises ConfigError if the device cannot share or has not so much memory.
        """
        size_bytes = num_blocks * layout.block_bytes
        if shared and device.type != "cpu":
            raise ConfigError("--transport", f"KV on {device} cannot lie in shared memory")
        try:
            if shared:
                fd = _open_memory_file(size_bytes)
                return cls(layout, _map(fd, size_bytes), fd)
            return cls(layout, torch.empty(size_bytes, dtype=torch.uint8, device=device), None)
        except (OSError, RuntimeError) as error:  # torch reports exhausted memory as RuntimeError
            raise ConfigError("--kv-memory", f"{size_bytes} bytes of KV on {device}: {error}") from error

    @property
    def layout(self) -> KvLayout:
        """Shape and dtype of one block."""
        return self._layout

    @property
    def num_blocks(self) -> int:
        """N."""
        return self.blocks_view.shape[0]

    @property
    def tensor(self) -> torch.Tensor:
        """`[N, L, 2, Hkv, S, D]` of the layout's dtype; a view, valid until `close`."""
        return self._open_bytes().view(TORCH_DTYPES[self._layout.dtype]).view(-1, *self._layout.block_shape)

    @property
    def blocks_view(self) -> torch.Tensor:
        """`[N, block_bytes]` uint8; a view of the same bytes."""
        return self._open_bytes().view(-1, self._layout.block_bytes)

    @property
    def shared_fd(self) -> int | None:
        """Descriptor of the memory file, owned by this cache; None if it is not shared."""
        return self._shared_fd

    def fill_poison(self) -> None:
        """Writes NaN everywhere, so that a test catches whoever reads a slot never written."""
        self.tensor.fill_(torch.nan)

    def close(self) -> None:
        """Gives memory and descriptor back. Idempotent.

        The mapping goes with its last view: unmapping under a view that somebody still holds
        would turn a late read into a crash.
        """
        self._bytes = None
        if self._shared_fd is not None:
            os.close(self._shared_fd)
            self._shared_fd = None

    def _open_bytes(self) -> torch.Tensor:
        if self._bytes is None:
            raise ValueError("the KV cache is closed")
        return self._bytes


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
