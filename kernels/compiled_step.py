"""The door of a whole decoder step in one call: what a kernel set is given to build it, and what it gives back.

Dimensions as in `kernels.attention`; R rows of logits. The parts hold weights as the set's own operations packed them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from kernels.attention import AttentionMetadata, AttentionParams
from kernels.operations import ExpertMaps, LinearMap, QkNorm, Rotation


class StepInputs(NamedTuple):
    """What a decoder computes one step of a ragged batch from; all on the model's device."""

    token_ids: torch.Tensor
    """`[T]` int64, as `positions`."""
    positions: torch.Tensor
    kv_cache: torch.Tensor
    """`[N, L, 2, Hkv, S, D]`, written at `metadata.slot_mapping`."""
    metadata: AttentionMetadata
    rows: torch.Tensor
    """`[R]` int64, ascending, each once: the tokens whose results are wanted; R may be 0. In a padded step any
    R tokens, in any order."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerParts:
    """One decoder layer: attention, and a gated MLP or experts; each with norms before, after, or both."""

    attention_norm: torch.Tensor | None
    """`[E]`, as all norms over E; None: there is none at that place."""
    qkv: LinearMap
    """E → (H + 2 * Hkv) * D."""
    qk_norm: QkNorm | None
    params: AttentionParams
    output: LinearMap
    """H * D → E."""
    attention_post_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    mlp: tuple[LinearMap, LinearMap] | ExpertMaps
    """E → I, activated, and I → E; or both of all experts."""
    mlp_post_norm: torch.Tensor | None
    rotation: int
    """Which of a step's rotations turns q and k."""


@dataclass(frozen=True, slots=True, eq=False)
class DecoderParts:
    """All weights of a decoder and its shape."""

    embedding: torch.Tensor | None
    """`[V, E]`; None: the rows of `lm_head`."""
    layers: tuple[LayerParts, ...]
    norm: torch.Tensor
    """`[E]`: weight of the last norm."""
    lm_head: LinearMap
    """E → V."""
    eps: float
    """Epsilon of every norm over E."""
    embedding_scale: float
    residual_scale: float
    """Factor of what attention and MLP return, after their norm and before the sum."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """I: of the MLPs; 0 where all layers have experts."""


class CompiledStep(Protocol):
    """One decoder's steps over any pool; results as those of the operations one by one."""

    def serves(self, kv_cache: torch.Tensor) -> bool:
        """Whether it reads and writes such a pool `[N, L, 2, Hkv, S, D]`."""

    def compute(self, step: StepInputs, rotations: Sequence[Rotation], *, projects: bool) -> torch.Tensor:
        """Stores KV and returns logits `[R, V]` if it `projects`, else the last hidden states `[R, E]`.

        Logits are what the output projection gives, neither divided nor capped. `rotations`: those that layers name.
        Raises InternalError if an id, row, slot, length or table is out of range; nothing has been computed then.
        """
