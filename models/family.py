"""Decoder families as data: all that distinguishes one from another.

Taken from transformers 5.23 (`modeling_*.py` and `configuration_*.py` of each).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from kernels.gates import Activation


class Bias(enum.Enum):
    """When a projection has a bias."""

    NEVER = "never"
    ALWAYS = "always"
    CONFIGURED = "configured"
    """config.json decides: `attention_bias` for attention, `mlp_bias` for the MLP."""
    NAMED = "named"
    """Bias as `qkv_bias` of config.json says; a bias if the key is absent."""


class Windows(enum.Enum):
    """How config.json gives layers their sliding windows."""

    NONE = "none"
    ALL_LAYERS = "all layers"
    """`sliding_window`, if not null, holds for every layer."""
    SWITCHED = "switched"
    """None, as `use_sliding_window` must be off; `sliding_window` then says nothing."""
    BY_LAYER = "by layer"
    """`use_sliding_window` with `layer_types`, or from layer `max_window_layers` on."""
    TYPED = "typed"
    """`sliding_window` for the layers that `layer_types` names so; without it for every layer."""
    PATTERN = "pattern"
    """The same; without `layer_types` for all but every n-th layer (`Family.global_every`)."""
    UNROTATED = "unrotated"
    """With `use_sliding_window`, as `layer_types` says; without it for the layers that are not rotated."""


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """What the norms of a layer are called in the checkpoint; None: there is none at that place."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None


PLAIN_NORMS = LayerNorms("input_layernorm", None, "post_attention_layernorm", None)
NORMS_AROUND = LayerNorms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
NORMS_AFTER = LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What config.json and the checkpoint call a family's experts."""

    size_key: str = "moe_intermediate_size"
    block: str = "mlp"
    """Name of a layer's block that holds the router (`gate`) and `experts`."""
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of an expert's gate, up and down projections."""
    adds_to_one: bool | None = None
    """Whether the shares of a token's experts do; None: as `norm_topk_prob` says."""
    shared: bool = False
    """Whether every token has a further expert, `shared_expert`."""
    router: str = "gate"
    stacked: bool = False
    """A tensor holds all experts, inputs first, gate and up in turns; router and experts have biases (gpt-oss)."""
    clamped: bool = False
    """The gate is `ClampedSwiglu`, by `swiglu_alpha` and `swiglu_limit`."""


@dataclass(frozen=True, slots=True)
class Family:
    """A family, by its `model_type` in config.json."""

    name: str
    architecture: str
    """The only entry of `architectures` that is served."""
    qkv_bias: Bias = Bias.NEVER
    output_bias: Bias = Bias.NEVER
    mlp_bias: Bias = Bias.NEVER
    qk_norm: bool = False
    """Whether RMSNorm is applied to q and k before the rotation."""
    whole_qk_norm: bool = False
    """Whether that norm takes all heads of a row together, instead of each head."""
    windows: Windows = Windows.NONE
    absent_bias: bool = False
    """If config.json has no `attention_bias`."""
    absent_window: int | None = 4096
    """If config.json has no `sliding_window`; null there means none."""
    global_every: int = 1
    """See `Windows.PATTERN`; `sliding_window_pattern` of config.json comes first."""
    activation: Activation = Activation.SILU
    activation_key: str = "hidden_act"
    norms: LayerNorms = PLAIN_NORMS
    norm_offset: bool = False
    """Norms multiply by 1 + weight."""
    wide_norms: bool = False
    """Whether norms multiply by their weight, in float32, before rounding."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by the root of `hidden_size`."""
    query_scale: bool = False
    """Scores are divided by the root of `query_pre_attn_scalar`, not of the head's size."""
    soft_caps: tuple[float | None, float | None] = (None, None)
    """Soft caps of scores and of logits, if config.json does not mention them."""
    multipliers: bool = False
    """`embedding_multiplier`, `residual_multiplier`, `attention_multiplier`, `logits_scaling`."""
    local_theta: float | None = None
    """Layers with a window have a rotation of their own, with this base if config.json has none."""
    absent_theta: float = 10_000.0
    absent_rms_norm_eps: float = 1e-6
    absent_tied: bool = False
    scaled_rope: bool = False
    """config.json must say how the rotation is scaled: transformers would assume more than a base."""
    long_rope_context: int | None = None
    """`su` and `yarn` mean longrope too; this is what an absent `original_max_position_embeddings` means."""
    sinks: bool = False
    """Each head of a layer has one more score in its softmax, without a value."""
    unrotated: bool = False
    """Some layers do not rotate q and k (`no_rope_layers`)."""
    experts: ExpertNames | None = None
    """Names of experts, in layers that have experts instead of an MLP."""
    fused_qkv: bool = False
    """The checkpoint holds q, k and v as a single tensor."""
    fused_gate_up: bool = False
    rotated_share: float | None = None
    """Share of a head's dimensions that are rotated, if config.json has no `partial_rotary_factor`; None rotates all.
    Any other share is refused."""
    rotates_neighbours: bool = False
    """Dimensions 2i and 2i + 1 are a pair; else i and i + half of those that are rotated."""
    absent_head_dim: int | None = None
    """If config.json has no `head_dim`; None means `hidden_size / num_attention_heads`."""
    absent_kv_heads: int | None = None
    """If config.json has no `num_key_value_heads`; None means `num_attention_heads`."""


_ATTENTION_BIAS: Any = {"qkv_bias": Bias.CONFIGURED, "output_bias": Bias.CONFIGURED}
_EVERY_BIAS: Any = {**_ATTENTION_BIAS, "mlp_bias": Bias.CONFIGURED}
_GEMMA: Any = {
    **_ATTENTION_BIAS,
    "windows": Windows.PATTERN,
    "activation": Activation.GELU_TANH,
    "activation_key": "hidden_activation",
    "norms": NORMS_AROUND,
    "norm_offset": True,
    "wide_norms": True,
    "scaled_embedding": True,
    "query_scale": True,
    "absent_head_dim": 256,
    "absent_kv_heads": 4,
    "absent_tied": True,
}
_GLM: Any = {
    "qkv_bias": Bias.CONFIGURED,
    "absent_bias": True,
    "fused_gate_up": True,
    "rotated_share": 0.5,
    "rotates_neighbours": True,
    "absent_head_dim": 128,
    "absent_kv_heads": 2,
    "absent_rms_norm_eps": 1.5625e-7,
}
_GLM4_NORMS = LayerNorms(
    "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
)
_OLMO: Any = {
    **_ATTENTION_BIAS,
    "qk_norm": True,
    "whole_qk_norm": True,
    "norms": NORMS_AFTER,
    "wide_norms": True,
    "absent_rms_norm_eps": 1e-5,
}
_MIXTRAL_EXPERTS = ExpertNames("intermediate_size", "block_sparse_moe", ("w1", "w3", "w2"), adds_to_one=True)
_GPT_OSS_EXPERTS = ExpertNames("intermediate_size", adds_to_one=True, router="router", stacked=True, clamped=True)

_ALL = (
    Family("llama", "LlamaForCausalLM", **_EVERY_BIAS),
    Family("mistral", "MistralForCausalLM", windows=Windows.ALL_LAYERS, absent_kv_heads=8),
    Family("ministral", "MinistralForCausalLM", windows=Windows.TYPED, absent_kv_heads=8),
    Family("qwen2", "Qwen2ForCausalLM", qkv_bias=Bias.ALWAYS, windows=Windows.BY_LAYER, absent_kv_heads=32),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        qk_norm=True,
        windows=Windows.BY_LAYER,
        absent_head_dim=128,
        absent_kv_heads=32,
        **_ATTENTION_BIAS,
    ),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        absent_theta=1_000_000.0,
        windows=Windows.ALL_LAYERS,
        absent_window=None,
        absent_rms_norm_eps=1e-5,
        absent_kv_heads=8,
        experts=_MIXTRAL_EXPERTS,
    ),
    Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        qkv_bias=Bias.NAMED,
        windows=Windows.SWITCHED,
        absent_kv_heads=16,
        experts=ExpertNames(shared=True),
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        qk_norm=True,
        windows=Windows.SWITCHED,
        absent_kv_heads=4,
        experts=ExpertNames(),
        **_ATTENTION_BIAS,
    ),
    Family("gemma2", "Gemma2ForCausalLM", global_every=2, soft_caps=(50.0, 30.0), **_GEMMA),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        qk_norm=True,
        global_every=6,
        local_theta=10_000.0,
        absent_theta=1_000_000.0,
        **_GEMMA,
    ),
    Family("granite", "GraniteForCausalLM", multipliers=True, **_EVERY_BIAS),
    Family("glm", "GlmForCausalLM", **_GLM),
    Family("glm4", "Glm4ForCausalLM", norms=_GLM4_NORMS, **_GLM),
    Family(
        "gpt_oss",
        "GptOssForCausalLM",
        absent_bias=True,
        windows=Windows.PATTERN,
        absent_window=128,
        global_every=2,
        wide_norms=True,
        absent_theta=150_000.0,
        scaled_rope=True,
        absent_rms_norm_eps=1e-5,
        absent_head_dim=64,
        absent_kv_heads=8,
        sinks=True,
        experts=_GPT_OSS_EXPERTS,
        **_ATTENTION_BIAS,
    ),
    Family("olmo2", "Olmo2ForCausalLM", **_OLMO),
    Family(
        "olmo3",
        "Olmo3ForCausalLM",
        windows=Windows.PATTERN,
        global_every=4,
        local_theta=500_000.0,
        absent_theta=500_000.0,
        **_OLMO,
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        windows=Windows.ALL_LAYERS,
        absent_window=None,
        absent_rms_norm_eps=1e-5,
        fused_qkv=True,
        fused_gate_up=True,
        rotated_share=1.0,
        long_rope_context=4096,
    ),
    Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        windows=Windows.UNROTATED,
        absent_window=None,
        absent_kv_heads=4,
        absent_theta=2_000_000.0,
        absent_tied=True,
        unrotated=True,
        **_EVERY_BIAS,
    ),
)
FAMILIES = {family.name: family for family in _ALL}
