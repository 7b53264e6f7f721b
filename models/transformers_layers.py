"""A whole layer of transformers' as one module of ours: the layer with a norm before attention and one before its MLP.

    x ─▶ norm ─▶ q, k, v as one product ─▶ attention ─▶ output ─▶ + x ─▶ norm ─▶ MLP ─▶ + ─▶

A layer is only replaced where ours gives the same bits on random rows, and asks attention for the same q and k; what
is not recognised stays as it is. Ours changes nothing that it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kernels.operations import LinearMap, Operations, QkNorm
from models.transformers_attention import Attends, Probe, Rows, Turns, left_to
from models.transformers_fusion import StackPart
from models.transformers_parts import Mapped, Norm

_CHILDREN = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_QK_NORMS = ("q_norm", "k_norm")
_TURNS = "position_embeddings"


@dataclass(frozen=True, slots=True, eq=False)
class _AttentionParts:
    """What a layer's attention is made of."""

    qkv: LinearMap
    output: LinearMap
    qk_norm: QkNorm | None
    num_heads: int
    num_kv_heads: int
    head_dim: int


class Layer(nn.Module):
    """In the place of a decoder layer; called without torch's hooks, as `Replacement` is."""

    tandem: Attends
    """Our attention, at the place where transformers' own modules attend."""

    def __init__(self, theirs: Any, attention: _AttentionParts, operations: Operations) -> None:
        super().__init__()
        self.layer_idx: int = theirs.self_attn.layer_idx
        self.mlp = theirs.mlp
        self.norms: tuple[Norm, Norm] = (theirs.input_layernorm, theirs.post_attention_layernorm)
        self.attention = attention
        self.operations = operations

    def __call__(self, hidden: torch.Tensor, *_: object, **given: Any) -> torch.Tensor:
        """Hidden states `[1, T, E]` → the same; of what else is given, it needs cos and sin alone."""
        parts, (before, after), rows = self.attention, self.norms, hidden[0]
        normed = self.operations.rms_norm(rows, before.scale, before.eps)
        qkv = parts.qkv(normed).view(len(rows), -1, parts.head_dim)  # [T, H + 2 * Hkv, D]
        asked = Rows(qkv, parts.num_heads, parts.num_kv_heads, given[_TURNS], parts.qk_norm)
        residual = rows + parts.output(self.tandem.attend_rows(self.layer_idx, asked).reshape(len(rows), -1))  # [T, E]
        normed = self.operations.rms_norm(residual, after.scale, after.eps)
        computed: torch.Tensor = residual + self.mlp(normed[None])
        return computed


def replace_layers(base: nn.Module, turns: Turns, operations: Operations, run: Callable[[], object]) -> None:
    """Replaces what it knows in `base`, whose rotations are left to `turns`. `run` passes a few tokens through it."""
    given = _recorded(base, run)
    for module in list(base.modules()):
        for name, child in list(module.named_children()):
            parts = _attention_parts(child) if _TURNS in given.get(child, {}) else None
            if parts is None:
                continue
            ours = Layer(child, parts, operations)
            if _is_equal(ours, child, given[child], turns):
                setattr(module, name, ours)


def _recorded(base: nn.Module, run: Callable[[], object]) -> dict[nn.Module, dict[str, Any]]:
    """The arguments by name that each layer is called with, its hidden states as `hidden_states`."""
    given: dict[nn.Module, dict[str, Any]] = {}

    def record(module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        if len(positional) == 1:
            given[module] = named | {"hidden_states": positional[0]}

    hooks = [
        module.register_forward_pre_hook(record, with_kwargs=True)
        for module in base.modules()
        if {name for name, _ in module.named_children()} == _CHILDREN
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return given


def _attention_parts(layer: Any) -> _AttentionParts | None:
    attention = layer.self_attn
    children = dict(attention.named_children())
    stacked = [children.get(name) for name in _PROJECTIONS]
    output, norms = children.get("o_proj"), [children[name] for name in _QK_NORMS if name in children]
    first, head_dim = stacked[0], getattr(attention, "head_dim", None)
    is_known = (
        all(isinstance(norm, Norm) for norm in (layer.input_layernorm, layer.post_attention_layernorm, *norms))
        and len(children) == len(_PROJECTIONS) + 1 + len(norms)
        and all(isinstance(each, StackPart) for each in stacked)
        and isinstance(getattr(attention, "layer_idx", None), int)
    )
    if not (is_known and isinstance(first, StackPart) and isinstance(output, Mapped) and isinstance(head_dim, int)):
        return None
    if norms and not (len(norms) == len(_QK_NORMS) and all(len(norm.scale) == head_dim for norm in norms)):
        return None
    qk_norm = QkNorm(norms[0].scale, norms[1].scale, norms[0].eps) if norms else None
    if any(size % head_dim for size in first.stack.sizes):
        return None
    num_heads, num_kv_heads, _ = (size // head_dim for size in first.stack.sizes)
    return _AttentionParts(first.stack.linear, output.linear, qk_norm, num_heads, num_kv_heads, head_dim)


def _is_equal(ours: Layer, theirs: Any, given: dict[str, Any], turns: Turns) -> bool:
    """On random rows, small ones too, beside which nothing that a layer adds is lost to rounding."""
    named = dict(given)
    seen = named.pop("hidden_states")
    if not isinstance(theirs.mlp(seen), torch.Tensor):
        return False
    draws = torch.Generator(seen.device).manual_seed(0)
    drawn = torch.randn(seen.shape, device=seen.device, generator=draws)
    return all(_is_equal_on((drawn * scale).to(seen.dtype), ours, theirs, named, turns) for scale in (1.0, 0.01))


def _is_equal_on(x: torch.Tensor, ours: Layer, theirs: Any, named: dict[str, Any], turns: Turns) -> bool:
    probes = Probe(ours.operations), Probe(ours.operations)
    with torch.inference_mode(), left_to(turns):
        object.__setattr__(theirs.self_attn, "tandem", probes[0])
        object.__setattr__(ours, "tandem", probes[1])
        expected, computed = theirs(x, **named), ours(x, **named)
    pairs = zip((expected, *probes[0].turned), (computed, *probes[1].turned), strict=True)
    return isinstance(expected, torch.Tensor) and all(torch.equal(*pair) for pair in pairs)
