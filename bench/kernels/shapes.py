"""What the kernels are measured at: layers of real models, batches of attention, by device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench.kernels.roofline import Cost, attention_cost
from tandem.kv_layout import SCALE_BYTES


@dataclass(frozen=True, slots=True)
class LayerShape:
    """A decoder's sizes, as far as kernels see them."""

    name: str
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_layers: int

    @property
    def qkv_rows(self) -> int:
        """Heads of q, k and v together."""
        return self.num_heads + 2 * self.num_kv_heads

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """`(in, out)` of a layer's linear maps, by name."""
        query_size = self.num_heads * self.head_dim
        return {
            "qkv": (self.hidden, self.qkv_rows * self.head_dim),
            "output": (query_size, self.hidden),
            "gate_up": (self.hidden, 2 * self.intermediate),
            "down": (self.intermediate, self.hidden),
        }


SHAPE_135M = LayerShape("135M", 576, 1536, 9, 3, 64, 49152, 30)
SHAPE_8B = LayerShape("8B", 4096, 14336, 32, 8, 128, 128256, 32)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One call of attention: `lens` are `(query_len, seq_len)` of each seq."""

    name: str
    lens: tuple[tuple[int, int], ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16

    def __str__(self) -> str:
        return f"{self.name}, H {self.num_heads}/{self.num_kv_heads} D {self.head_dim} S {self.block_size}"

    @property
    def is_decode(self) -> bool:
        """Whether every seq computes one token."""
        return all(query_len == 1 for query_len, _ in self.lens)

    @property
    def is_fresh(self) -> bool:
        """Whether no seq has context from before."""
        return all(query_len == seq_len for query_len, seq_len in self.lens)

    @property
    def num_tokens(self) -> int:
        """T."""
        return sum(query_len for query_len, _ in self.lens)

    def cost(self, dtype: torch.dtype) -> Cost:
        """Of the call."""
        return attention_cost(self.lens, (self.num_heads, self.num_kv_heads), self.head_dim, dtype)

    def kv_bytes(self, dtype: torch.dtype) -> int:
        """Keys and values of all seqs."""
        return 2 * self.num_kv_heads * self.head_dim * dtype.itemsize * sum(seq_len for _, seq_len in self.lens)

    def quantized_cost(self, dtype: torch.dtype) -> Cost:
        """Of the call over KV of a byte per element and a float32 scale per row."""
        plain = self.cost(dtype)
        rows_bytes = self.kv_bytes(torch.int8) * (self.head_dim + SCALE_BYTES) // self.head_dim
        return Cost(plain.num_bytes - self.kv_bytes(dtype) + rows_bytes, plain.flops, dtype)


def decode_shape(batch: int, context: int, heads: tuple[int, int, int], block_size: int = 16) -> AttentionShape:
    """One token for each of `batch` seqs; `heads` are `(H, Hkv, D)`."""
    return AttentionShape(f"decode {batch} × {context}", ((1, context),) * batch, *heads, block_size)


def prompt_shape(prompts: int, tokens: int, heads: tuple[int, int, int], block_size: int = 16) -> AttentionShape:
    """Fresh prompts of one length."""
    return AttentionShape(f"prefill {prompts} × {tokens}", ((tokens, tokens),) * prompts, *heads, block_size)


def chunk_shape(tokens: int, context: int, heads: tuple[int, int, int], block_size: int = 16) -> AttentionShape:
    """One chunk after earlier context."""
    return AttentionShape(f"chunk {tokens} after {context}", ((tokens, context + tokens),), *heads, block_size)


def mixed_shape(lens: Sequence[int], heads: tuple[int, int, int], block_size: int = 16) -> AttentionShape:
    """Fresh prompts of many lengths."""
    name = f"prefill {len(lens)} prompts of {min(lens)}–{max(lens)}"
    return AttentionShape(name, tuple((length, length) for length in lens), *heads, block_size)


_SMALL, _MEDIUM = (9, 3, 64), (16, 8, 128)
_HEADS = {64: (32, 8, 64), 128: (32, 8, 128), 256: (16, 8, 256)}
_MIX = (17, 4095, 130, 1023, 512, 64, 2048, 303)

CPU_ATTENTION = (
    *(decode_shape(batch, context, _SMALL) for batch, context in ((1, 256), (16, 256), (64, 256), (8, 2048))),
    *(decode_shape(16, 512, _MEDIUM, block_size) for block_size in (1, 16, 256)),
    *(prompt_shape(prompts, tokens, _SMALL) for prompts, tokens in ((16, 256), (1, 2048))),
    prompt_shape(1, 1024, _MEDIUM),
    chunk_shape(512, 1536, _SMALL),
    mixed_shape((17, 255, 130, 64, 512), _SMALL),
)

CUDA_ATTENTION = (
    *(prompt_shape(1, tokens, heads) for heads in _HEADS.values() for tokens in (1024, 2048, 4096, 8192, 16384)),
    *(mixed_shape(_MIX, heads) for heads in _HEADS.values()),
    *(chunk_shape(2048, context, _HEADS[128]) for context in (2048, 6144, 14336)),
    *(
        decode_shape(batch, context, _HEADS[128])
        for context in (256, 2048, 8192, 32768)
        for batch in (1, 8, 32, 64, 128, 256)
        if batch * context <= 1 << 20
    ),
    *(decode_shape(32, 4096, heads, block_size) for heads in _HEADS.values() for block_size in (16, 64, 256)),
)
