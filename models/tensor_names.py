"""Which tensors a checkpoint of a given shape holds, by Hugging Face's names. Pure; needs no torch."""

from __future__ import annotations

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
    layer_tensors = _attention_tensors(config) | _mlp_tensors(config)
    for layer in range(config.num_layers):
        tensors |= {layer_prefix(layer) + name: shape for name, shape in layer_tensors.items()}
    return tensors


def _attention_tensors(config: ModelConfig) -> dict[str, Shape]:
    hidden, q_size = config.hidden_size, config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    tensors: dict[str, Shape] = {"input_layernorm.weight": (hidden,)}
    tensors |= _linear("self_attn.q_proj", q_size, hidden, bias=config.qkv_bias)
    tensors |= _linear("self_attn.k_proj", kv_size, hidden, bias=config.qkv_bias)
    tensors |= _linear("self_attn.v_proj", kv_size, hidden, bias=config.qkv_bias)
    tensors |= _linear("self_attn.o_proj", hidden, q_size, bias=config.output_bias)
    if config.qk_norm:
        tensors |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    return tensors


def _mlp_tensors(config: ModelConfig) -> dict[str, Shape]:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    tensors: dict[str, Shape] = {"post_attention_layernorm.weight": (hidden,)}
    tensors |= _linear("mlp.gate_proj", intermediate, hidden, bias=config.mlp_bias)
    tensors |= _linear("mlp.up_proj", intermediate, hidden, bias=config.mlp_bias)
    tensors |= _linear("mlp.down_proj", hidden, intermediate, bias=config.mlp_bias)
    return tensors


def _linear(name: str, out_size: int, in_size: int, *, bias: bool) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (out_size, in_size)}
    return weight | ({f"{name}.bias": (out_size,)} if bias else {})
