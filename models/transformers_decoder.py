"""Any decoder that transformers can run, with our attention, KV cache and linear maps in the place of its own.

    transformers' forward ─▶ attention  paged, over our pool, by each layer's own scale, window and soft cap
                          ─▶ linear maps as the kernel set packs them, those of experts and their routers too

What each layer asks of attention is recorded once, at load, on one token: a layer that attends as our kernels do not,
or does not attend at all, is refused by name. A token's logits do not depend on what else is in the batch: all
products are ours, and the rest of such a model works row by row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kernels.attention import AttentionMetadata, AttentionParams
from kernels.operations import Kernels, LinearMap, Operations, Rotation

IMPLEMENTATION = "tandem"
"""As transformers knows our attention and experts. It is none of its mask functions, so models make no masks for it."""
_IGNORED_RULES = frozenset({"position_ids", "use_cache", "cache_position", "dropout", "is_causal"})
"""What models tell attention, and ours needs not."""

Pack: TypeAlias = Callable[[torch.Tensor, torch.Tensor | None], LinearMap]
"""Makes a linear map of weight `[out, in]` and bias `[out]`."""


class UnsupportedModel(Exception):
    """The model computes in a way that our parts do not; says in which."""


class _Attends(Protocol):
    """What stands behind the attention of a layer."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: dict[str, Any]
    ) -> torch.Tensor:
        """Q `[1, H, T, D]`, k and v `[1, Hkv, T, D]` → `[1, T, H, D]`."""


@dataclass(slots=True)
class _Probe:
    """Records what each layer asks."""

    params: dict[int, AttentionParams] = field(default_factory=dict)
    kv_shapes: set[tuple[int, int]] = field(default_factory=set)
    """`(num_kv_heads, head_dim)`."""

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
        return v.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(1, 2)


@dataclass(slots=True)
class _Paged:
    """Attends by our kernels; holds the step that runs."""

    kernels: Kernels
    params: dict[int, AttentionParams]
    step: tuple[torch.Tensor, AttentionMetadata, Rotation] | None = None
    """KV cache `[N, L, 2, Hkv, S, D]`, and a rotation that turns nothing: the model has done so by itself."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: dict[str, Any]
    ) -> torch.Tensor:
        assert self.step is not None
        kv_cache, metadata, rotation = self.step
        kv_layer, num_heads, num_rotated = kv_cache[:, layer], q.shape[1], q.shape[1] + k.shape[1]
        qkv = torch.cat((q[0], k[0], v[0])).transpose(0, 1).contiguous()  # [T, H + 2 * Hkv, D]
        self.kernels.operations.rotate_and_store(qkv, rotation, None, kv_layer)
        parts = qkv[:, :num_heads], qkv[:, num_heads:num_rotated], qkv[:, num_rotated:]
        return self.kernels.attention.attend(*parts, kv_layer, metadata, self.params[layer])[None]


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
            output = self.base(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        finally:
            self.paged.step = None
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


class _Mapped(nn.Module):
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
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class _Norm(nn.Module):
    """RMSNorm by our operations."""

    def __init__(self, weight: torch.Tensor, eps: float, operations: Operations) -> None:
        super().__init__()
        self.scale = weight
        self.eps = eps
        self.operations = operations

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.operations.rms_norm(x.reshape(-1, x.shape[-1]), self.scale, self.eps).view(x.shape)


def build(model: PreTrainedModel, kernels: Kernels, pack: Pack) -> tuple[TransformersDecoder, set[tuple[int, int]]]:
    """Puts our parts into `model`, whose weights are loaded; also returns the `(num_kv_heads, head_dim)` of its layers.

    Raises UnsupportedModel.
    """
    base, probe = model.base_model, _Probe()
    if base is model:
        raise UnsupportedModel("a causal model without a base")
    _map_products(model, pack)
    _replace_norms(base, kernels.operations)
    _seat(base, probe)
    token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        base(input_ids=token, position_ids=token, use_cache=False)
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if set(probe.params) != set(range(num_layers)):
        raise UnsupportedModel(f"{num_layers} layers of which {len(probe.params)} attend")
    paged, given = _Paged(kernels, probe.params), GivenHidden()
    _seat(base, paged)
    setattr(model, model.base_model_prefix, given)
    return TransformersDecoder(base, model, given, paged), probe.kv_shapes


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
    out = torch.zeros_like(x)
    for expert, (gate_up, down) in enumerate(module.tandem):
        tokens, ranks = torch.where(expert_ids == expert)
        if len(tokens):
            computed = down(module._apply_gate(gate_up(x[tokens]))) * shares[tokens, ranks, None]
            out.index_add_(0, tokens, computed.to(out.dtype))
    return out


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attend)
ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _compute_experts)
