"""Decoder families as data: what distinguishes Llama, Mistral, Ministral, Qwen2 and Qwen3, and nothing else does.

Taken from transformers 5.23 (`modeling_*.py` and `configuration_*.py` of each).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Bias(enum.Enum):
    """When a projection has a bias."""

    NEVER = "never"
    ALWAYS = "always"
    CONFIGURED = "configured"
    """As config.json says: `attention_bias` for attention, `mlp_bias` for the MLP."""


class Windows(enum.Enum):
    """How config.json gives layers their sliding windows."""

    NONE = "none"
    ALL_LAYERS = "all layers"
    """`sliding_window`, if not null, holds for every layer."""
    BY_LAYER = "by layer"
    """`use_sliding_window` with `layer_types`, or from layer `max_window_layers` on."""
    TYPED = "typed"
    """`sliding_window` for the layers that `layer_types` names so; without it for every layer."""


@dataclass(frozen=True, slots=True)
class Family:
    """One family, by its `model_type` in config.json."""

    name: str
    architecture: str
    """The only entry of `architectures` that is served."""
    qkv_bias: Bias = Bias.NEVER
    output_bias: Bias = Bias.NEVER
    mlp_bias: Bias = Bias.NEVER
    qk_norm: bool = False
    """RMSNorm over each head's q and k before they are rotated."""
    windows: Windows = Windows.NONE
    absent_head_dim: int | None = None
    """If config.json has no `head_dim`; None means `hidden_size / num_attention_heads`."""
    absent_kv_heads: int | None = None
    """If config.json has no `num_key_value_heads`; None means `num_attention_heads`."""


FAMILIES = {
    family.name: family
    for family in (
        Family(
            name="llama",
            architecture="LlamaForCausalLM",
            qkv_bias=Bias.CONFIGURED,
            output_bias=Bias.CONFIGURED,
            mlp_bias=Bias.CONFIGURED,
        ),
        Family(name="mistral", architecture="MistralForCausalLM", windows=Windows.ALL_LAYERS, absent_kv_heads=8),
        Family(name="ministral", architecture="MinistralForCausalLM", windows=Windows.TYPED, absent_kv_heads=8),
        Family(
            name="qwen2",
            architecture="Qwen2ForCausalLM",
            qkv_bias=Bias.ALWAYS,
            windows=Windows.BY_LAYER,
            absent_kv_heads=32,
        ),
        Family(
            name="qwen3",
            architecture="Qwen3ForCausalLM",
            qkv_bias=Bias.CONFIGURED,
            output_bias=Bias.CONFIGURED,
            qk_norm=True,
            windows=Windows.BY_LAYER,
            absent_head_dim=128,
            absent_kv_heads=32,
        ),
    )
}
