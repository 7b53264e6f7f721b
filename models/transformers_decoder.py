"""Any decoder that transformers can run, with our attention, KV cache and linear maps in the place of its own.

    transformers' forward ─▶ attention  paged, over our pool, by each layer's own scale, window and soft cap
                          ─▶ linear maps as the kernel set packs them, those of experts and their routers too
                          ─▶ rotation, where it is the usual one of halves: by our attention, as it stores keys
                          ─▶ whole layers, where ours equal them bit by bit (`models.transformers_layers`)

What each layer asks of attention is recorded once, at load, on one token: a layer that attends as our kernels do not,
or does not attend at all, is refused by name. A token's logits do not depend on what else is in the batch: all
products are ours, and the rest of such a model works row by row.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kernels.compiled_step import StepInputs
from kernels.operations import Kernels, Operations, Rotation
from models.transformers_attention import (
    Attends,
    Paged,
    Probe,
    Turns,
    defer_rotation,
    left_to,
)
from models.transformers_fusion import fuse_products
from models.transformers_layers import replace_layers
from models.transformers_masks import ASKED, Mask, UnsupportedModel
from models.transformers_parts import Mapped, Norm, Pack

IMPLEMENTATION = "tandem"
"""The name by which transformers knows our attention and experts. It names none of its mask functions, so models make
no masks for our attention. While a model is probed, `ASKED` stands in its place."""
_PROBED_TOKENS = 5
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Names of linear maps that choose experts or weigh them: small, so they are not rounded, as in native models."""


@dataclass(frozen=True, slots=True, eq=False)
class TransformersDecoder:
    """A loaded model of transformers, used as `models.decoder.Decoder` is. Holds weights, no state."""

    base: nn.Module
    """Token ids to hidden states."""
    head: nn.Module
    """The causal model; in the place of its base stands `given`."""
    given: GivenHidden
    paged: Paged
    compiled: ClassVar[None] = None
    """See `models.decoder.Decoder.compiled`."""

    def forward(self, step: StepInputs) -> torch.Tensor:
        """See `models.decoder.Decoder.forward`."""
        return self.project(self.hidden(step))

    def hidden(self, step: StepInputs) -> torch.Tensor:
        """See `models.decoder.Decoder.hidden`."""
        token_ids, positions, kv_cache, metadata, rows = step
        ones = torch.ones((len(token_ids), kv_cache.shape[-1] // 2), device=token_ids.device)
        self.paged.step = kv_cache, metadata, Rotation(ones, torch.zeros_like(ones), metadata.slot_mapping)
        try:
            with left_to(self.paged.turns):
                output = self.base(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        finally:
            self.paged.step = None
            self.paged.rotations.clear()
        hidden: torch.Tensor = output.last_hidden_state[0]  # [T, E]
        return hidden[rows]

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


class _MappedWeight(torch.Tensor):
    """The weight of a module that calls `F.linear` directly, like routers of experts: multiplied by our map."""

    mapped: Mapped

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and isinstance(args[1], cls) and len(args) == 2 and not kwargs:
            return args[1].mapped(args[0])
        with torch._C.DisableTorchFunctionSubclass():  # of another dtype it is a plain tensor, which no map stands for
            return func(*args, **(kwargs or {}))


def build(
    model: PreTrainedModel, kernels: Kernels, pack: Pack, pack_gated: Pack, pack_router: Pack
) -> tuple[TransformersDecoder, set[tuple[int, int]]]:
    """Puts our parts into `model`, whose weights are loaded; also returns the `(num_kv_heads, head_dim)` of its layers.

    `pack_router`: of what chooses experts. Raises UnsupportedModel.
    """
    base = model.base_model
    if base is model:
        raise UnsupportedModel("a causal model without a base")
    fuse_products(model, pack, pack_gated)
    _map_products(model, pack, pack_router)
    _replace_norms(base, kernels.operations)
    probe, turns = _probe(base, model.device, None, kernels.operations), Turns()
    for module in _modules_that_rotate(base):
        defer_rotation(module)
    deferred = _probe(base, model.device, turns, kernels.operations)
    is_deferred = all(map(_is_same, deferred.turned, probe.turned))
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if set(probe.params) != set(range(num_layers)):
        raise UnsupportedModel(f"{num_layers} layers of which {len(probe.params)} attend")
    if is_deferred:
        replace_layers(base, turns, kernels.operations, lambda: _probe(base, model.device, turns, kernels.operations))
    paged, given = Paged(kernels, probe.params, turns if is_deferred else None), GivenHidden()
    _seat(base, paged)
    setattr(model, model.base_model_prefix, given)
    return TransformersDecoder(base, model, given, paged), probe.kv_shapes


def _probe(base: nn.Module, device: torch.device, turns: Turns | None, operations: Operations) -> Probe:
    """Probes a pass over a few tokens."""
    probe = Probe(operations)
    _seat(base, probe)
    tokens = torch.arange(_PROBED_TOKENS, device=device)[None]
    config: Any = base.config
    config._attn_implementation = ASKED
    try:
        with torch.inference_mode(), left_to(turns):
            base(input_ids=tokens, position_ids=tokens, use_cache=False)
    finally:
        config._attn_implementation = IMPLEMENTATION
    return probe


def _is_same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Up to rounding."""
    bound = 4 * torch.finfo(theirs.dtype).eps * float(theirs.abs().max())
    return ours.shape == theirs.shape and torch.allclose(ours.float(), theirs.float(), rtol=0, atol=bound)


def _modules_that_rotate(base: nn.Module) -> list[Any]:
    """Python modules of the library whose layers rotate by a function of theirs."""
    names = {type(module).__module__ for module in base.modules() if hasattr(module, "layer_idx")}
    return [sys.modules[name] for name in sorted(names) if hasattr(sys.modules[name], "apply_rotary_pos_emb")]


def _seat(base: nn.Module, attends: Attends) -> None:
    for module in base.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            object.__setattr__(module, "tandem", attends)


def _map_products(model: nn.Module, pack: Pack, pack_router: Pack) -> None:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                map_of = pack_router if name in _ROUTERS else pack
                setattr(module, name, Mapped(map_of(child.weight, child.bias), child.out_features))
        if hasattr(module, "has_gate") and hasattr(module, "is_transposed"):
            _map_experts(module, pack)
        elif "Router" in type(module).__name__ and "weight" in module._parameters:
            weight = module._parameters.pop("weight")
            assert weight is not None
            mapped = weight.detach().as_subclass(_MappedWeight)
            mapped.mapped = Mapped(pack_router(weight, None), len(weight))
            object.__setattr__(module, "weight", mapped)


def _replace_norms(model: nn.Module, operations: Operations) -> None:
    """Replaces the norms that ours equal on random rows; families differ in what is added to the weight, and in where
    values are rounded.
    """
    for module in list(model.modules()):
        for name, child in module.named_children():
            weight = child._parameters.get("weight")
            eps = getattr(child, "variance_epsilon", getattr(child, "eps", None))
            if "RMSNorm" not in type(child).__name__ or weight is None or weight.ndim != 1 or not eps:
                continue
            rows = torch.randn((3, len(weight)), device=weight.device, generator=torch.Generator(weight.device))
            rows = rows.to(weight.dtype)
            for scale in (weight.detach(), 1 + weight.detach()):
                ours = Norm(scale, float(eps), operations)
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


def _ask(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: object, **rules: Any
) -> tuple[torch.Tensor, None]:
    """`_attend`, of a model that is probed."""
    if not isinstance(mask, Mask):
        raise UnsupportedModel("attention without a mask")
    return _attend(module, q, k, v, None, mask=mask, **rules)


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
ALL_ATTENTION_FUNCTIONS.register(ASKED, _ask)
ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _compute_experts)
