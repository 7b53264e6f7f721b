"""How KV lies in memory: shape, bytes per block, fingerprint. Shared by engine and transfer.

A pool is one tensor `[N, Hkv, L, 2, S, D]` in memory, read as `[N, L, 2, Hkv, S, D]`; a block is one contiguous span of
bytes across all layers: the unit of allocation, transfer and checksum. Heads come first, so that the heads of one rank
of a tensor-parallel worker are one span of each block too. Quantised KV has a scale per token, head and side: behind
the S * D elements of each head and side of a layer lie its S scales, float32.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace

from tandem.errors import ConfigError
from tandem.str_enum import StrEnum


class DType(StrEnum):
    """Element types of weights and KV, by torch's names."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of an element."""
        return 4 if self is DType.FLOAT32 else 2


class QuantDType(StrEnum):
    """Element types of KV that is stored with scales: value = element * scale."""

    INT8 = "int8"
    FP8 = "fp8"
    """e4m3: 4 bits of exponent, 3 of mantissa, no infinities."""

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of an element, without its share of a scale."""
        return 1


SCALE_BYTES = 4
LAYOUT_VERSION = 2
"""2: `[N, Hkv, L, 2, S, D]`, row-major; of quantised KV, S scales behind each `[S, D]`."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Dimensions of one block: L layers, K and V, Hkv heads, S token slots, D elements."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: DType | QuantDType

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """`(L, 2, Hkv, S, D)`."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's K or V in one head, its scale included."""
        scale_bytes = SCALE_BYTES if isinstance(self.dtype, QuantDType) else 0
        return self.head_dim * self.dtype.itemsize_bytes + scale_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's KV across all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.row_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.token_bytes * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def part(self, num_ranks: int) -> KvLayout:
        """Returns the layout of one rank's part of the blocks, where `num_ranks` ranks divide the heads.

        Ranks that outnumber the heads share them: each holds one head. Raises ConfigError where that is uneven.
        """
        heads = self.num_kv_heads
        if heads % num_ranks and num_ranks % heads:
            raise ConfigError("--tensor-parallel", f"{num_ranks} ranks cannot share {heads} K/V heads")
        return replace(self, num_kv_heads=max(1, heads // num_ranks))

    def fields(self) -> dict[str, str]:
        """Each dimension by name, for comparisons that must say what differs."""
        return {"layout_version": str(LAYOUT_VERSION), **{name: str(value) for name, value in asdict(self).items()}}

    def fingerprint(self) -> str:
        """32 hex digits; equal if and only if blocks may be copied byte for byte."""
        text = ",".join(f"{name}={value}" for name, value in self.fields().items())
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
