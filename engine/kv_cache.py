"""The tensor that holds every KV block of a pool, on a device or in shared memory.

Owns memory, and the mirror in host memory that stands for a pool that transports cannot
reach. Knows nothing of who holds which block.
"""

from __future__ import annotations

from typing import Final

import torch

from engine.host_memory import HostMemory
from engine.mirror import PoolMirror
from models.dtypes import torch_dtype
from tandem.errors import ConfigError
from tandem.kv_layout import KvLayout
from tandem.telemetry.logging import get_logger

_log = get_logger(__name__)


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
        return self._open_bytes().view(torch_dtype(self.layout.dtype)).view(-1, *self.layout.block_shape)

    @property
    def blocks_view(self) -> torch.Tensor:
        """`[N, block_bytes]` uint8; a view of the same bytes."""
        return self._open_bytes().view(-1, self.layout.block_bytes)

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

    def _open_bytes(self) -> torch.Tensor:
        if self._bytes is None:
            raise ValueError("the KV cache is closed")
        return self._bytes
