"""The decoder: token ids in, logits of the sampled rows out, KV written on the way.

One implementation of all families; what they differ in is data (`models/family.py`) by the
time it gets here. Knows attention back-ends only by their interface, and nothing of seqs,
schedules or sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from kernels.attention import AttentionBackend, AttentionMetadata
from models.layers import GatedMlp, Linear, RmsNorm
from models.rope import RotaryEmbedding, rotate


@dataclass(frozen=True, slots=True)
class HeadShape:
    """How a projected row divides into heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class Attention:
    """Projections, rotation and attention of one layer."""

    __slots__ = ("_backend", "_heads", "_output", "_qk_norm", "_qkv", "_scale", "_sliding_window")

    def __init__(
        self,
        qkv: Linear,
        output: Linear,
        qk_norm: RmsNorm | None,
        heads: HeadShape,
        sliding_window: int | None,
        backend: AttentionBackend,
    ) -> None:
        self._qkv = qkv  # [(H + 2 * Hkv) * D, E]
        self._output = output  # [E, H * D]
        self._qk_norm = qk_norm  # weight [H + Hkv, D]
        self._heads = heads
        self._scale = heads.head_dim**-0.5
        self._sliding_window = sliding_window
        self._backend = backend

    def __call__(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv_layer: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """X `[T, E]` → `[T, E]`; writes this step's K and V into `kv_layer` `[N, 2, Hkv, S, D]`."""
        num_heads, num_rotated = self._heads.num_heads, self._heads.num_heads + self._heads.num_kv_heads
        qkv = self._qkv(x).view(len(x), -1, self._heads.head_dim)  # [T, H + 2 * Hkv, D]
        qk, v = qkv[:, :num_rotated], qkv[:, num_rotated:]  # [T, H + Hkv, D], [T, Hkv, D]
        if self._qk_norm is not None:
            qk = self._qk_norm(qk)
        qk = rotate(qk, cos, sin)
        q, k = qk[:, :num_heads], qk[:, num_heads:]  # [T, H, D], [T, Hkv, D]
        self._backend.store_kv(k, v, kv_layer, metadata.slot_mapping)
        attended = self._backend.attend(q, k, v, kv_layer, metadata, self._scale, self._sliding_window)
        return self._output(attended.reshape(len(x), -1))


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention and MLP, each with its norm before and its residual around."""

    attention_norm: RmsNorm
    attention: Attention
    mlp_norm: RmsNorm
    mlp: GatedMlp


class Decoder:
    """A loaded model; built by `models.loading`. Holds weights, no state: KV is the caller's."""

    __slots__ = ("_embedding", "_layers", "_lm_head", "_norm", "_rope")

    def __init__(
        self,
        embedding: torch.Tensor,
        layers: tuple[DecoderLayer, ...],
        norm: RmsNorm,
        lm_head: Linear,
        rope: RotaryEmbedding,
    ) -> None:
        self._embedding = embedding  # [V, E]
        self._layers = layers
        self._norm = norm
        self._lm_head = lm_head  # [V, E]
        self._rope = rope

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        sample_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Computes one step of a ragged batch; returns logits `[R, V]` float32.

        `token_ids`, `positions` `[T]` int64; `kv_cache` `[N, L, 2, Hkv, S, D]`, written at
        `metadata.slot_mapping`; `sample_rows` `[R]` int64, the rows whose logits are wanted
        (R may be 0). All on the model's device.
        """
        hidden = F.embedding(token_ids, self._embedding)  # [T, E]
        cos, sin = self._rope.cos_sin(positions, hidden.dtype)
        for index, layer in enumerate(self._layers):
            attended = layer.attention(layer.attention_norm(hidden), cos, sin, kv_cache[:, index], metadata)
            hidden = hidden + attended
            hidden = hidden + layer.mlp(layer.mlp_norm(hidden))
        sampled = self._norm(hidden[sample_rows])  # [R, E]
        return self._lm_head(sampled).to(torch.float32)
