"""Any decoder that transformers can run, with our attention, KV cache and linear maps in the place of its own.

    transformers' forward ─▶ attention  paged, over our pool, by each layer's own scale, window and soft cap
                          ─▶ linear maps as the kernel set packs them, those of experts and their routers too
                          ─▶ rotation, where it is the usual one of halves: by our attention, as it stores keys

What each layer asks of attention is recorded once, at load, on one token: a layer that attends as our kernels do not,
or does not attend at all, is refused by name. A token's logits do not depend on what else is in the batch: all
products are ours, and the rest of such a model works row by row.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kernels.attention import AttentionMetadata, AttentionParams
from kernels.operations import Kernels, LinearMap, Operations, Rotation
from models.transformers_fusion import Pack, Replacement, fuse_products

IMPLEMENTATION = "tandem"
"""As transformers knows our attention and experts. It is none of its mask functions, so models make no masks for it."""
_IGNORED_RULES = frozenset({"position_ids", "use_cache", "cache_position", "dropout", "is_causal"})
"""What models tell attention, and ours needs not."""
_PROBED_TOKENS = 5


class UnsupportedModel(Exception):
    """The model computes in a way that our parts do not; says in which."""


class _Attends(Protocol):
    """What stands behind the attention of a layer."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: dict[str, Any]
    ) -> torch.Tensor:
        """Q `[1, H, T, D]`, k and v `[1, Hkv, T, D]` → `[1, T, H, D]`."""


@dataclass(slots=True)
class _Turns:
    """What a model asked to turn q and k by, which is left to attention."""

    asked: tuple[torch.Tensor, torch.Tensor] | None = None
    """Cos and sin `[1, T, D]`, of the layer that attends next."""

    def take(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        asked, self.asked = self.asked, None
        return asked


_turns: _Turns | None = None
"""Of the model that computes now, if it leaves its rotations to attention; one thread computes."""


@contextmanager
def _left_to(turns: _Turns | None) -> Iterator[None]:
    global _turns  # noqa: PLW0603 - models call a function of their module, which knows no model
    _turns = turns
    try:
        yield
    finally:
        _turns = None


def _defer_rotation(module: Any) -> None:
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
class _Probe:
    """Records what each layer asks."""

    params: dict[int, AttentionParams] = field(default_factory=dict)
    kv_shapes: set[tuple[int, int]] = field(default_factory=set)
    """`(num_kv_heads, head_dim)`."""
    turned: list[torch.Tensor] = field(default_factory=list)
    """Q and k of each layer as attention multiplies them."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: dict[str, Any]
    ) -> torch.Tensor:
        unknown = {name for name, value in rules.items() if value is not None} - _IGNORED_RULES
        unknown -= {"scaling", "sliding_window", "softcap"}
        if unknown:
            raise UnsupportedModel(f"attention with {', '.join(sorted(unknown))}")
        if k.shape != v.shape or q.shape[-1] != k.shape[-1]:
            raise UnsupportedModel("keys and values of different sizes")
        if layer in self.params:
            raise UnsupportedModel("layers that attend more than once")
        scale = rules.get("scaling")
        self.params[layer] = AttentionParams(
            k.shape[-1] ** -0.5 if scale is None else float(scale), rules.get("sliding_window"), rules.get("softcap")
        )
        self.kv_shapes.add((k.shape[1], k.shape[-1]))
        turns = None if _turns is None else _turns.take()
        self.turned += (q, k) if turns is None else (_turned(q, *turns), _turned(k, *turns))
        return v.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(1, 2)


@dataclass(slots=True)
class _Paged:
    """Attends by our kernels; holds the step that runs."""

    kernels: Kernels
    params: dict[int, AttentionParams]
    turns: _Turns | None
    """Where the model's rotations are left to attention."""
    step: tuple[torch.Tensor, AttentionMetadata, Rotation] | None = None
    """KV cache `[N, L, 2, Hkv, S, D]`, and a rotation that turns nothing, for layers that have turned, or turn not."""
    rotations: list[tuple[torch.Tensor, Rotation]] = field(default_factory=list)
    """Of the step, by the model's cos."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: dict[str, Any]
    ) -> torch.Tensor:
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

    def _rotation(self, cos: torch.Tensor, sin: torch.Tensor, metadata: AttentionMetadata) -> Rotation:
        for known, rotation in self.rotations:
            if known is cos:
                return rotation
        halves = [each[0, :, : cos.shape[-1] // 2].float().contiguous() for each in (cos, sin)]
        rotation = Rotation(halves[0], halves[1], metadata.slot_mapping)
        self.rotations.append((cos, rotation))
        return rotation


@dataclass(frozen=True, slots=True, eq=False)
class TransformersDecoder:
    """A loaded model of transformers, used as `models.decoder.Decoder` is. Holds weights, no state."""

    base: nn.Module
    """Token ids to hidden states."""
    head: nn.Module
    """The causal model; in the place of its base stands `given`."""
    given: GivenHidden
    paged: _Paged
    compiled: ClassVar[None] = None
    """See `models.decoder.Decoder.compiled`."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        sample_rows: torch.Tensor,
    ) -> torch.Tensor:
        """See `models.decoder.Decoder.forward`."""
        return self.project(self.hidden(token_ids, positions, kv_cache, metadata, sample_rows))

    def hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        sample_rows: torch.Tensor,
    ) -> torch.Tensor:
        """See `models.decoder.Decoder.hidden`."""
        ones = torch.ones((len(token_ids), kv_cache.shape[-1] // 2), device=token_ids.device)
        self.paged.step = kv_cache, metadata, Rotation(ones, torch.zeros_like(ones), metadata.slot_mapping)
        try:
            with _left_to(self.paged.turns):
                output = self.base(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        finally:
            self.paged.step = None
            self.paged.rotations.clear()
        hidden: torch.Tensor = output.last_hidden_state[0]  # [T, E]
        return hidden[sample_rows]

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `models.decoder.Decoder.project`."""
        self.given.hidden = hidden[None]
        try:
            logits: torch.Tensor = self.head(use_cache=False).logits[0]
        finally:
            self.given.hidden = None
        return logits


class GivenHidden(nn.Module):
    """Stands where a causal model has its base: returns the hidden states `[1, R, E]` that were put into it."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: torch.Tensor | None = None

    def forward(self, *_: object, **__: object) -> MoeModelOutputWithPast:
        """All arguments are ignored."""
        return MoeModelOutputWithPast(last_hidden_state=self.hidden)


class _Mapped(Replacement):
    """A linear map of ours in the place of theirs."""

    def __init__(self, linear: LinearMap, num_outputs: int) -> None:
        super().__init__()
        self.linear = linear
        self.num_outputs = num_outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self.num_outputs)


class _MappedWeight(torch.Tensor):
    """The weight of a module that calls `F.linear` by itself, as routers of experts do: multiplied by our map."""

    mapped: _Mapped

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and isinstance(args[1], cls) and len(args) == 2 and not kwargs:
            return args[1].mapped(args[0])
        with torch._C.DisableTorchFunctionSubclass():  # of another dtype it is a plain tensor, which no map stands for
            return func(*args, **(kwargs or {}))


class _Norm(Replacement):
    """RMSNorm by our operations."""

    def __init__(self, weight: torch.Tensor, eps: float, operations: Operations) -> None:
        super().__init__()
        self.scale = weight
        self.eps = eps
        self.operations = operations

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.operations.rms_norm(x.reshape(-1, x.shape[-1]), self.scale, self.eps).view(x.shape)


def build(
    model: PreTrainedModel, kernels: Kernels, pack: Pack, pack_gated: Pack
) -> tuple[TransformersDecoder, set[tuple[int, int]]]:
    """Puts our parts into `model`, whose weights are loaded; also returns the `(num_kv_heads, head_dim)` of its layers.

    Raises UnsupportedModel.
    """
    base = model.base_model
    if base is model:
        raise UnsupportedModel("a causal model without a base")
    fuse_products(model, pack, pack_gated)
    _map_products(model, pack)
    _replace_norms(base, kernels.operations)
    probe, turns = _probe(base, model.device, None), _Turns()
    for module in _modules_that_rotate(base):
        _defer_rotation(module)
    deferred = _probe(base, model.device, turns)
    is_deferred = all(map(_is_same, deferred.turned, probe.turned))
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if set(probe.params) != set(range(num_layers)):
        raise UnsupportedModel(f"{num_layers} layers of which {len(probe.params)} attend")
    paged, given = _Paged(kernels, probe.params, turns if is_deferred else None), GivenHidden()
    _seat(base, paged)
    setattr(model, model.base_model_prefix, given)
    return TransformersDecoder(base, model, given, paged), probe.kv_shapes


def _probe(base: nn.Module, device: torch.device, turns: _Turns | None) -> _Probe:
    """Of a pass over a few tokens."""
    probe = _Probe()
    _seat(base, probe)
    tokens = torch.arange(_PROBED_TOKENS, device=device)[None]
    with torch.inference_mode(), _left_to(turns):
        base(input_ids=tokens, position_ids=tokens, use_cache=False)
    return probe


def _is_same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Up to rounding."""
    bound = 4 * torch.finfo(theirs.dtype).eps * float(theirs.abs().max())
    return ours.shape == theirs.shape and torch.allclose(ours.float(), theirs.float(), rtol=0, atol=bound)


def _modules_that_rotate(base: nn.Module) -> list[Any]:
    """Python modules of the library whose layers rotate by a function of theirs."""
    names = {type(module).__module__ for module in base.modules() if hasattr(module, "layer_idx")}
    return [sys.modules[name] for name in sorted(names) if hasattr(sys.modules[name], "apply_rotary_pos_emb")]


def _seat(base: nn.Module, attends: _Attends) -> None:
    for module in base.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            object.__setattr__(module, "tandem", attends)


def _map_products(model: nn.Module, pack: Pack) -> None:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, _Mapped(pack(child.weight, child.bias), child.out_features))
        if hasattr(module, "has_gate") and hasattr(module, "is_transposed"):
            _map_experts(module, pack)
        elif "Router" in type(module).__name__ and "weight" in module._parameters:
            weight = module._parameters.pop("weight")
            assert weight is not None
            mapped = weight.detach().as_subclass(_MappedWeight)
            mapped.mapped = _Mapped(pack(weight, None), len(weight))
            object.__setattr__(module, "weight", mapped)


def _replace_norms(model: nn.Module, operations: Operations) -> None:
    """Those that ours equal on random rows; families differ in what they add to the weight, and where they round."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            weight = child._parameters.get("weight")
            eps = getattr(child, "variance_epsilon", getattr(child, "eps", None))
            if "RMSNorm" not in type(child).__name__ or weight is None or weight.ndim != 1 or not eps:
                continue
            rows = torch.randn((3, len(weight)), device=weight.device, generator=torch.Generator(weight.device))
            rows = rows.to(weight.dtype)
            for scale in (weight.detach(), 1 + weight.detach()):
                ours = _Norm(scale, float(eps), operations)
                if torch.allclose(ours(rows), child(rows), rtol=2 * torch.finfo(weight.dtype).eps, atol=0):
                    setattr(module, name, ours)
                    break


def _map_experts(experts: Any, pack: Pack) -> None:
    """`tandem` of the module becomes one pair of linear maps per expert, as `_compute_experts` reads them."""
    if experts.is_transposed or experts.has_bias or experts.has_post_expert_norm or not experts.has_gate:
        raise UnsupportedModel("experts with biases, norms, transposed weights or without gates")
    object.__setattr__(
        experts,
        "tandem",
        [(pack(up, None), pack(down, None)) for up, down in zip(experts.gate_up_proj, experts.down_proj, strict=True)],
    )
    experts.gate_up_proj = experts.down_proj = None


def _attend(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _mask: object, **rules: Any
) -> tuple[torch.Tensor, None]:
    """What transformers calls in the place of its own attention."""
    return module.tandem.attend(module.layer_idx, q, k, v, rules), None


def _compute_experts(module: Any, x: torch.Tensor, expert_ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """X `[T, E]`, `expert_ids` and `shares` `[T, K]` → `[T, E]`; a token's experts are added in ascending order."""
    out, flat = torch.zeros_like(x), expert_ids.flatten()
    counts = torch.bincount(flat, minlength=len(module.tandem)).tolist()
    order = flat.argsort(stable=True)  # those of one expert after the other, in order of tokens
    for (gate_up, down), picked in zip(module.tandem, torch.split_with_sizes(order, counts), strict=False):
        if len(picked):
            tokens = picked // expert_ids.shape[1]
            computed = down(module._apply_gate(gate_up(x[tokens]))) * shares.flatten()[picked, None]
            out.index_add_(0, tokens, computed.to(out.dtype))
    return out


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attend)
ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _compute_experts)
