"""The decoder: token ids in, logits of the sampled rows out, KV written on the way.

One implementation of all families; what they differ in is data (`models/family.py`) by the
time it gets here. Knows attention back-ends only by their interface, and nothing of seqs,
schedules or sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.attention import AttentionMetadata, AttentionParams
from kernels.compiled_step import CompiledStep, DecoderParts, LayerParts, StepInputs
from kernels.operations import Embedding, Kernels, LinearMap, PlainEmbedding, QkNorm, Rotation
from models.experts import MixtureOfExperts
from models.layers import GatedMlp, NoNorm, RmsNorm
from models.rope import RotaryEmbedding


@dataclass(frozen=True, slots=True)
class HeadShape:
    """How a projected row divides into heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """Projections, rotation and attention of a layer."""

    qkv: LinearMap  # [(H + 2 * Hkv) * D, E]
    output: LinearMap  # [E, H * D]
    qk_norm: QkNorm | None
    heads: HeadShape
    params: AttentionParams
    kernels: Kernels

    def __call__(
        self,
        x: torch.Tensor,
        rotation: Rotation,
        kv_layer: torch.Tensor,
        metadata: AttentionMetadata,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """X `[T, E]` → `[T, E]`, or `[R, E]` for `rows` `[R]` alone; writes K and V of all T into `kv_layer`.

        `kv_layer` is `[N, 2, Hkv, S, D]`.
        """
        num_heads, num_rotated = self.heads.num_heads, self.heads.num_heads + self.heads.num_kv_heads
        qkv = self.qkv(x).view(len(x), -1, self.heads.head_dim)  # [T, H + 2 * Hkv, D]
        self.kernels.operations.rotate_and_store(qkv, rotation, self.qk_norm, kv_layer)
        attended = self.kernels.attention.attend(
            qkv[:, :num_heads],
            qkv[:, num_heads:num_rotated],
            qkv[:, num_rotated:],
            kv_layer,
            metadata,
            self.params,
        )  # [T, H, D]
        attended = attended.reshape(len(x), -1)  # [T, H * D]
        return self.output(attended if rows is None else attended[rows])


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention and MLP, each with its residual around, and its norm before, after, or both."""

    attention_norm: RmsNorm | NoNorm
    attention: Attention
    attention_post_norm: RmsNorm | NoNorm
    mlp_norm: RmsNorm | NoNorm
    mlp: GatedMlp | MixtureOfExperts
    mlp_post_norm: RmsNorm | NoNorm
    rope: int = 0
    """Which of the decoder's ropes turns its q and k."""

    def parts(self) -> LayerParts:
        """What `Kernels.compile_step` takes."""
        return LayerParts(
            attention_norm=self.attention_norm.weight,
            qkv=self.attention.qkv,
            qk_norm=self.attention.qk_norm,
            params=self.attention.params,
            output=self.attention.output,
            attention_post_norm=self.attention_post_norm.weight,
            mlp_norm=self.mlp_norm.weight,
            mlp=(self.mlp.gate_up, self.mlp.down) if isinstance(self.mlp, GatedMlp) else self.mlp.experts,
            mlp_post_norm=self.mlp_post_norm.weight,
            rotation=self.rope,
        )


@dataclass(frozen=True, slots=True)
class Scales:
    """What some families multiply by, beside their weights."""

    embedding: float = 1.0
    residual: float = 1.0
    """Factor of what attention and MLP return, before the sum."""
    logit_divisor: float = 1.0
    logit_cap: float | None = None
    """c: logits x become `c * tanh(x / c)`."""


@dataclass(frozen=True, slots=True, eq=False)
class Decoder:
    """A loaded model; built by `models.loading`. Holds weights, no state: KV is the caller's."""

    embedding: Embedding  # [V, E]
    layers: tuple[DecoderLayer, ...]
    norm: RmsNorm
    lm_head: LinearMap  # [V, E]
    ropes: tuple[RotaryEmbedding, ...]
    scales: Scales = Scales()
    compiled: CompiledStep | None = None
    """Computes whole steps where it serves the pool; else, and where it is None, one operation follows the other."""

    @property
    def waits_for_device(self) -> bool:
        """Whether a step reads on the host what its layers computed, so that no graph can hold it."""
        return any(isinstance(layer.mlp, MixtureOfExperts) and layer.mlp.waits_for_device for layer in self.layers)

    def parts(self) -> DecoderParts:
        """What `Kernels.compile_step` takes."""
        heads = self.layers[0].attention.heads
        widths = (layer.mlp.intermediate_size for layer in self.layers if isinstance(layer.mlp, GatedMlp))
        return DecoderParts(
            embedding=self.embedding.table if isinstance(self.embedding, PlainEmbedding) else None,
            layers=tuple(layer.parts() for layer in self.layers),
            norm=self.norm.weight,
            lm_head=self.lm_head,
            eps=self.norm.eps,
            embedding_scale=self.scales.embedding,
            residual_scale=self.scales.residual,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            intermediate_size=max(widths, default=0),
        )

    def forward(self, step: StepInputs) -> torch.Tensor:
        """Computes one step; returns logits `[R, V]`."""
        if self.compiled is not None and self.compiled.serves(step.kv_cache):
            return self._scaled(self.compiled.compute(step, self._rotations(step), projects=True))
        return self.project(self._hidden(step))

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Last hidden states `[R, E]` → logits `[R, V]`."""
        return self._scaled(self.lm_head(hidden))

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        scales = self.scales
        if scales.logit_divisor != 1.0:
            logits = logits / scales.logit_divisor
        return logits if scales.logit_cap is None else torch.tanh(logits / scales.logit_cap) * scales.logit_cap

    def hidden(self, step: StepInputs) -> torch.Tensor:
        """Computes one step but for its logits; returns the last hidden states `[R, E]`."""
        if self.compiled is not None and self.compiled.serves(step.kv_cache):
            return self.compiled.compute(step, self._rotations(step), projects=False)
        return self._hidden(step)

    def _rotations(self, step: StepInputs) -> tuple[Rotation, ...]:
        return tuple(Rotation(*rope.cos_sin(step.positions), step.metadata.slot_mapping) for rope in self.ropes)

    def _hidden(self, step: StepInputs) -> torch.Tensor:
        """Computes the hidden rows, operation by operation."""
        rotations, kv_cache, metadata = self._rotations(step), step.kv_cache, step.metadata
        hidden = self.embedding(step.token_ids)  # [T, E]
        if self.scales.embedding != 1.0:
            hidden = hidden * self.scales.embedding
        delta: torch.Tensor | None = None  # what the previous layer has yet to add
        for layer, kv_layer in zip(self.layers[:-1], kv_cache.unbind(1), strict=False):
            normed = _add_norm(layer.attention_norm, delta, hidden)
            attended = layer.attention(normed, rotations[layer.rope], kv_layer, metadata)
            attended = self._delta(attended, layer.attention_post_norm)
            delta = self._delta(layer.mlp(layer.mlp_norm.add(attended, hidden)), layer.mlp_post_norm)
        # After the last layer's KV only the wanted rows matter.
        last, is_all = self.layers[-1], len(step.rows) == len(hidden) and not metadata.is_padded
        rows = None if is_all else step.rows
        normed = _add_norm(last.attention_norm, delta, hidden)
        attended = last.attention(normed, rotations[last.rope], kv_cache[:, -1], metadata, rows)  # [R, E]
        attended = self._delta(attended, last.attention_post_norm)
        hidden = hidden if rows is None else hidden[rows]
        delta = self._delta(last.mlp(last.mlp_norm.add(attended, hidden)), last.mlp_post_norm)
        return self.norm.add(delta, hidden)

    def _delta(self, computed: torch.Tensor, post_norm: RmsNorm | NoNorm) -> torch.Tensor:
        """What is added for what attention or MLP `computed` `[T, E]`."""
        normed = post_norm(computed)
        return normed if self.scales.residual == 1.0 else normed * self.scales.residual


def _add_norm(norm: RmsNorm | NoNorm, delta: torch.Tensor | None, hidden: torch.Tensor) -> torch.Tensor:
    return norm(hidden) if delta is None else norm.add(delta, hidden)
