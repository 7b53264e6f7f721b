"""The decoder: token ids in, logits of the sampled rows out, KV written on the way.

One implementation of all families; what they differ in is data (`models/family.py`) by the
time it gets here. Knows attention back-ends only by their interface, and nothing of seqs,
schedules or sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from kernels.attention import AttentionMetadata, AttentionParams
from kernels.operations import Kernels, LinearMap, QkNorm
from models.layers import GatedMlp, RmsNorm
from models.rope import RotaryEmbedding


@dataclass(frozen=True, slots=True)
class HeadShape:
    """How a projected row divides into heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class Attention:
    """Projections, rotation and attention of one layer."""

    __slots__ = ("_heads", "_kernels", "_output", "_params", "_qk_norm", "_qkv")

    def __init__(
        self,
        qkv: LinearMap,
        output: LinearMap,
        qk_norm: QkNorm | None,
        heads: HeadShape,
        sliding_window: int | None,
        kernels: Kernels,
    ) -> None:
        self._qkv = qkv  # [(H + 2 * Hkv) * D, E]
        self._output = output  # [E, H * D]
        self._qk_norm = qk_norm
        self._heads = heads
        self._params = AttentionParams(heads.head_dim**-0.5, sliding_window)
        self._kernels = kernels

    def __call__(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv_layer: torch.Tensor,
        metadata: AttentionMetadata,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """X `[T, E]` → `[T, E]`, or `[R, E]` for `rows` `[R]` alone; writes K and V of all T into `kv_layer`.

        `kv_layer` is `[N, 2, Hkv, S, D]`.
        """
        num_heads, num_rotated = self._heads.num_heads, self._heads.num_heads + self._heads.num_kv_heads
        qkv = self._qkv(x).view(len(x), -1, self._heads.head_dim)  # [T, H + 2 * Hkv, D]
        self._kernels.operations.rotate_and_store(qkv, cos, sin, self._qk_norm, kv_layer, metadata.slot_mapping)
        attended = self._kernels.attention.attend(
            qkv[:, :num_heads],
            qkv[:, num_heads:num_rotated],
            qkv[:, num_rotated:],
            kv_layer,
            metadata,
            self._params,
        )  # [T, H, D]
        attended = attended.reshape(len(x), -1)  # [T, H * D]
        return self._output(attended if rows is None else attended[rows])


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
        lm_head: LinearMap,
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
        """Computes one step of a ragged batch; returns logits `[R, V]`.

        `token_ids`, `positions` `[T]` int64; `kv_cache` `[N, L, 2, Hkv, S, D]`, written at
        `metadata.slot_mapping`; `sample_rows` `[R]` int64, the rows whose logits are wanted
        (R may be 0). All on the model's device.
        """
        hidden = F.embedding(token_ids, self._embedding)  # [T, E]
        cos, sin = self._rope.cos_sin(positions)
        delta: torch.Tensor | None = None  # what the previous layer has yet to add
        for layer, kv_layer in zip(self._layers[:-1], kv_cache.unbind(1), strict=False):
            normed = _add_norm(layer.attention_norm, delta, hidden)
            attended = layer.attention(normed, cos, sin, kv_layer, metadata)
            delta = layer.mlp(layer.mlp_norm.add(attended, hidden))
        # After the last layer's KV only the sampled rows matter.
        last, rows = self._layers[-1], None if len(sample_rows) == len(hidden) else sample_rows
        normed = _add_norm(last.attention_norm, delta, hidden)
        attended = last.attention(normed, cos, sin, kv_cache[:, -1], metadata, rows)  # [R, E]
        hidden = hidden if rows is None else hidden[rows]
        delta = last.mlp(last.mlp_norm.add(attended, hidden))
        return self._lm_head(self._norm.add(delta, hidden))


def _add_norm(norm: RmsNorm, delta: torch.Tensor | None, hidden: torch.Tensor) -> torch.Tensor:
    return norm(hidden) if delta is None else norm.add(delta, hidden)
