"""What stands behind the attention of transformers' layers: a probe that records, or our kernels over the paged pool.

A model's rotations may be left to attention (`Turns`), which turns q and k as it stores keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from kernels.attention import AttentionMetadata, AttentionParams
from kernels.operations import Kernels, Operations, QkNorm, Rotation
from models.transformers_masks import Mask, UnsupportedModel

_IGNORED_RULES = frozenset({"position_ids", "use_cache", "cache_position", "dropout", "is_causal"})
"""What models tell attention, and ours needs not."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Q, k and v of one layer as one product left them, before norm and rotation."""

    qkv: torch.Tensor
    """`[T, H + 2 * Hkv, D]`, overwritten."""
    num_heads: int
    num_kv_heads: int
    turns: tuple[torch.Tensor, torch.Tensor]
    """Cos and sin `[1, T, D]`."""
    qk_norm: QkNorm | None

    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Q `[T, H, D]`, k and v `[T, Hkv, D]`: views."""
        num_rotated = self.num_heads + self.num_kv_heads
        return self.qkv[:, : self.num_heads], self.qkv[:, self.num_heads : num_rotated], self.qkv[:, num_rotated:]


class Attends(Protocol):
    """What stands behind the attention of a layer."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: dict[str, Any]
    ) -> torch.Tensor:
        """Q `[1, H, T, D]`, k and v `[1, Hkv, T, D]` → `[1, T, H, D]`."""

    def attend_rows(self, layer: int, rows: Rows) -> torch.Tensor:
        """Norms, rotates and attends → `[T, H, D]`."""


@dataclass(slots=True)
class Turns:
    """What a model asked to turn q and k by, which is left to attention."""

    asked: tuple[torch.Tensor, torch.Tensor] | None = None
    """Cos and sin `[1, T, D]`, of the layer that attends next."""

    def take(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What was asked last, once."""
        asked, self.asked = self.asked, None
        return asked


_turns: Turns | None = None
"""Rotations of the model that computes now, if the model leaves them to attention; one thread computes."""


@contextmanager
def left_to(turns: Turns | None) -> Iterator[None]:
    """Within, a model's rotations are left to its attention; `turns` None: they are its own."""
    global _turns  # noqa: PLW0603 - models call a function of their module, which knows no model
    _turns = turns
    try:
        yield
    finally:
        _turns = None


def defer_rotation(module: Any) -> None:
    """`apply_rotary_pos_emb` of a model's module asks attention to rotate, while a model computes that leaves it so."""
    theirs = module.apply_rotary_pos_emb
    if hasattr(theirs, "tandem"):
        return

    def apply(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if _turns is None or cos.shape != (1, *q.shape[-2:]):
            turned: tuple[torch.Tensor, torch.Tensor] = theirs(q, k, cos, sin, *rest, **options)
            return turned
        _turns.asked = cos, sin
        return q, k

    apply.tandem = theirs  # type: ignore[attr-defined]
    module.apply_rotary_pos_emb = apply


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """X `[1, H, T, D]`, as `rotate_and_store` turns it: by the first half of cos and sin `[1, T, D]`."""
    if cos.shape[-1] != x.shape[-1]:
        return x  # a part of each head was to be turned; as it is, it does not pass for it
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = (each[:, None, :, : x.shape[-1] // 2].float() for each in (cos, sin))
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@dataclass(slots=True)
class Probe:
    """Records what each layer asks."""

    operations: Operations
    params: dict[int, AttentionParams] = field(default_factory=dict)
    kv_shapes: set[tuple[int, int]] = field(default_factory=set)
    """`(num_kv_heads, head_dim)`."""
    turned: list[torch.Tensor] = field(default_factory=list)
    """Q and k of each layer, as attention multiplies them."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: dict[str, Any]
    ) -> torch.Tensor:
        """See `Attends.attend`."""
        unknown = {name for name, value in rules.items() if value is not None} - _IGNORED_RULES
        unknown -= {"scaling", "sliding_window", "softcap", "mask"}
        if unknown:
            raise UnsupportedModel(f"attention with {', '.join(sorted(unknown))}")
        if k.shape != v.shape or q.shape[-1] != k.shape[-1]:
            raise UnsupportedModel("keys and values of different sizes")
        if layer in self.params:
            raise UnsupportedModel("layers that attend more than once")
        scale, window, mask = (rules.get(name) for name in ("scaling", "sliding_window", "mask"))
        if isinstance(mask, Mask):
            window = mask.window(window)
        self.params[layer] = AttentionParams(
            k.shape[-1] ** -0.5 if scale is None else float(scale), window, rules.get("softcap")
        )
        self.kv_shapes.add((k.shape[1], k.shape[-1]))
        turns = None if _turns is None else _turns.take()
        self.turned += (q, k) if turns is None else (_turned(q, *turns), _turned(k, *turns))
        return v.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(1, 2)

    def attend_rows(self, layer: int, rows: Rows) -> torch.Tensor:
        """See `Attends.attend_rows`; records q and k as `attend` does."""
        q, k, v = rows.parts()
        if rows.qk_norm is not None:
            q, k = (
                self._normed(q, rows.qk_norm.q_weight, rows.qk_norm),
                self._normed(k, rows.qk_norm.k_weight, rows.qk_norm),
            )
        q, k = (each.transpose(0, 1)[None] for each in (q, k))
        self.turned += (_turned(q, *rows.turns), _turned(k, *rows.turns))
        return v.repeat_interleave(rows.num_heads // rows.num_kv_heads, dim=1)

    def _normed(self, heads: torch.Tensor, weight: torch.Tensor, norm: QkNorm) -> torch.Tensor:
        rows = heads.reshape(-1, heads.shape[-1])
        return self.operations.rms_norm(rows, weight, norm.eps).view(heads.shape)


@dataclass(slots=True)
class Paged:
    """Attends by our kernels; holds the step that runs."""

    kernels: Kernels
    params: dict[int, AttentionParams]
    turns: Turns | None
    """Where the model's rotations are left to attention."""
    step: tuple[torch.Tensor, AttentionMetadata, Rotation] | None = None
    """KV cache `[N, L, 2, Hkv, S, D]`, and a rotation that turns nothing, for layers that have turned, or turn not."""
    rotations: list[tuple[torch.Tensor, Rotation]] = field(default_factory=list)
    """Rotations of the step, by the model's cos."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: dict[str, Any]
    ) -> torch.Tensor:
        """See `Attends.attend`."""
        assert self.step is not None
        kv_cache, metadata, rotation = self.step
        kv_layer, num_heads, num_rotated = kv_cache[:, layer], q.shape[1], q.shape[1] + k.shape[1]
        turns = None if self.turns is None else self.turns.take()
        if turns is not None:
            rotation = self._rotation(*turns, metadata)
        qkv = torch.cat([each[0].transpose(0, 1) for each in (q, k, v)], dim=1)  # [T, H + 2 * Hkv, D]
        self.kernels.operations.rotate_and_store(qkv, rotation, None, kv_layer)
        parts = qkv[:, :num_heads], qkv[:, num_heads:num_rotated], qkv[:, num_rotated:]
        return self.kernels.attention.attend(*parts, kv_layer, metadata, self.params[layer])[None]

    def attend_rows(self, layer: int, rows: Rows) -> torch.Tensor:
        """See `Attends.attend_rows`."""
        assert self.step is not None
        kv_cache, metadata, _ = self.step
        kv_layer = kv_cache[:, layer]
        rotation = self._rotation(*rows.turns, metadata)
        self.kernels.operations.rotate_and_store(rows.qkv, rotation, rows.qk_norm, kv_layer)
        return self.kernels.attention.attend(*rows.parts(), kv_layer, metadata, self.params[layer])

    def _rotation(self, cos: torch.Tensor, sin: torch.Tensor, metadata: AttentionMetadata) -> Rotation:
        for known, rotation in self.rotations:
            if known is cos:
                return rotation
        halves = [each[0, :, : cos.shape[-1] // 2].float().contiguous() for each in (cos, sin)]
        rotation = Rotation(halves[0], halves[1], metadata.slot_mapping)
        self.rotations.append((cos, rotation))
        return rotation
