"""Which tensors a checkpoint of a given shape holds, by Hugging Face's names. Pure; needs no torch."""

from __future__ import annotations

import re
from dataclasses import astuple

from models.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"

MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
STACKED_PROJECTIONS = ("gate_up_proj", "down_proj")
"""Projections of experts that share a tensor."""

Shape = tuple[int, ...]

_STACKED = re.compile(r"(\.experts\.(?:gate_up|down)_proj)(?:_(bias|blocks|scales))?")


def layer_prefix(layer: int) -> str:
    """The prefix of the names of a layer's tensors."""
    return f"model.layers.{layer}."


def stacked_tensor(name: str) -> str:
    """What stacked experts call a tensor, in the form that every module's have: a name, a dot, and the part."""
    match = _STACKED.search(name)
    if match is None or match.end() < len(name):
        return name
    return f"{name[: match.end(1)]}.{match[2] or 'weight'}"


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Name and shape of every tensor; `lm_head.weight` only if untied."""
    embedding = (config.vocab_size, config.hidden_size)
    tensors: dict[str, Shape] = {EMBEDDING: embedding, FINAL_NORM: (config.hidden_size,)}
    if not config.tied:
        tensors[LM_HEAD] = embedding
    for layer in range(config.num_layers):
        has_experts = config.experts is not None and config.experts.layers[layer]
        mlp = _expert_tensors(config) if has_experts else _mlp_tensors(config)
        tensors |= {layer_prefix(layer) + name: shape for name, shape in (_attention_tensors(config) | mlp).items()}
    return tensors


def _attention_tensors(config: ModelConfig) -> dict[str, Shape]:
    """And the norms of a layer."""
    hidden = config.hidden_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    tensors: dict[str, Shape] = {
        f"{name}.weight": (hidden,) for name in astuple(config.traits.norms) if name is not None
    }
    if config.traits.sinks:
        tensors["self_attn.sinks"] = (config.num_heads,)
    if config.traits.qk_norm:
        q_width, k_width = (q_size, kv_size) if config.traits.whole_qk_norm else (config.head_dim, config.head_dim)
        tensors |= {"self_attn.q_norm.weight": (q_width,), "self_attn.k_norm.weight": (k_width,)}
    if config.traits.fused_qkv:
        tensors |= _map_tensors("self_attn.qkv_proj", q_size + 2 * kv_size, hidden, has_bias=config.qkv_bias)
    else:
        for name, out_size in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
            tensors |= _map_tensors(f"self_attn.{name}", out_size, hidden, has_bias=config.qkv_bias)
    return tensors | _map_tensors("self_attn.o_proj", hidden, q_size, has_bias=config.output_bias)


def _mlp_tensors(config: ModelConfig) -> dict[str, Shape]:
    hidden, intermediate, has_bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    if config.traits.fused_gate_up:
        tensors = _map_tensors("mlp.gate_up_proj", 2 * intermediate, hidden, has_bias=has_bias)
        return tensors | _map_tensors("mlp.down_proj", hidden, intermediate, has_bias=has_bias)
    return _gated_tensors("mlp.", MLP_PROJECTIONS, intermediate, hidden, has_bias=has_bias)


def _expert_tensors(config: ModelConfig) -> dict[str, Shape]:
    experts, hidden = config.experts, config.hidden_size
    assert experts is not None
    block, names = f"{experts.names.block}.", experts.names.projections
    router = f"{block}{experts.names.router}"
    tensors = _map_tensors(router, experts.num_experts, hidden, has_bias=experts.names.stacked)
    if experts.names.stacked:
        num_experts, gate_up = experts.num_experts, 2 * experts.intermediate_size
        return tensors | {
            f"{block}experts.gate_up_proj.weight": (num_experts, hidden, gate_up),
            f"{block}experts.gate_up_proj.bias": (num_experts, gate_up),
            f"{block}experts.down_proj.weight": (num_experts, experts.intermediate_size, hidden),
            f"{block}experts.down_proj.bias": (num_experts, hidden),
        }
    for expert in range(experts.num_experts):
        tensors |= _gated_tensors(f"{block}experts.{expert}.", names, experts.intermediate_size, hidden)
    if experts.shared_intermediate_size is not None:
        tensors[f"{block}shared_expert_gate.weight"] = (1, hidden)
        tensors |= _gated_tensors(f"{block}shared_expert.", names, experts.shared_intermediate_size, hidden)
    return tensors


def _gated_tensors(
    prefix: str, names: tuple[str, str, str], intermediate: int, hidden: int, *, has_bias: bool = False
) -> dict[str, Shape]:
    """Gate, up and down of an MLP."""
    gate, up, down = (prefix + name for name in names)
    into = [_map_tensors(name, intermediate, hidden, has_bias=has_bias) for name in (gate, up)]
    return into[0] | into[1] | _map_tensors(down, hidden, intermediate, has_bias=has_bias)


def _map_tensors(name: str, out_size: int, in_size: int, *, has_bias: bool) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (out_size, in_size)}
    return weight | {f"{name}.bias": (out_size,)} if has_bias else weight
