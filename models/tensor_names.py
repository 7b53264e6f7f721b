"""Which tensors a checkpoint of a given shape holds, by Hugging Face's names. Pure; needs no torch."""

from __future__ import annotations

from dataclasses import astuple

from models.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"

Shape = tuple[int, ...]


def layer_prefix(layer: int) -> str:
    """What the names of one layer's tensors begin with."""
    return f"model.layers.{layer}."


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Name and shape of every tensor; `lm_head.weight` only if untied."""
    embedding = (config.vocab_size, config.hidden_size)
    tensors: dict[str, Shape] = {EMBEDDING: embedding, FINAL_NORM: (config.hidden_size,)}
    if not config.tied:
        tensors[LM_HEAD] = embedding
    layer_tensors = _layer_tensors(config)
    for layer in range(config.num_layers):
        tensors |= {layer_prefix(layer) + name: shape for name, shape in layer_tensors.items()}
    return tensors


def _layer_tensors(config: ModelConfig) -> dict[str, Shape]:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    tensors: dict[str, Shape] = {f"{name}.weight": (hidden,) for name in astuple(config.norms) if name is not None}
    if config.qk_norm:
        q_width, k_width = (q_size, kv_size) if config.whole_qk_norm else (config.head_dim, config.head_dim)
        tensors |= {"self_attn.q_norm.weight": (q_width,), "self_attn.k_norm.weight": (k_width,)}
    stacked: tuple[tuple[str, int, int, bool], ...] = (
        ("self_attn.q_proj", q_size, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv_size, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv_size, hidden, config.qkv_bias),
        ("mlp.gate_proj", intermediate, hidden, config.mlp_bias),
        ("mlp.up_proj", intermediate, hidden, config.mlp_bias),
    )
    if config.fused:
        stacked = (
            ("self_attn.qkv_proj", q_size + 2 * kv_size, hidden, config.qkv_bias),
            ("mlp.gate_up_proj", 2 * intermediate, hidden, config.mlp_bias),
        )
    for name, out_size, in_size, has_bias in (
        *stacked,
        ("self_attn.o_proj", hidden, q_size, config.output_bias),
        ("mlp.down_proj", hidden, intermediate, config.mlp_bias),
    ):
        tensors[f"{name}.weight"] = (out_size, in_size)
        if has_bias:
            tensors[f"{name}.bias"] = (out_size,)
    return tensors
