"""What a decoder's shape is, read from config.json of a Hugging Face folder. Needs no torch.

Strict: a key that would change the computation and is not understood is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from kernels.gates import ClampedSwiglu, Gate
from models.config_json import ConfigJson
from models.family import FAMILIES, Bias, ExpertNames, Family, Windows
from models.files.gguf import find_gguf, read_gguf
from models.rope_config import LongRopeScaling, RopeConfig, read_ropes, stretched_context
from tandem.kv_layout import DType

CONFIG_FILE = "config.json"

# What transformers assumes where config.json is silent; null is not silence.
_ABSENT_MAX_WINDOW_LAYERS = 28
_ABSENT_QUERY_SCALAR = 256.0
_ABSENT_NO_ROPE_INTERVAL = 4
_ABSENT_SWIGLU_ALPHA, _ABSENT_SWIGLU_LIMIT = 1.702, 7.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What is known of any decoder: L num_layers, Hkv num_kv_heads, D head_dim, V vocab_size."""

    family: str
    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    context_tokens: int
    """The longest sequence, as far as rope scaling stretches the context."""
    dtype: DType | None
    """What the weights were saved as, if config.json says so."""


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """Experts of a decoder: X in all, K for each token."""

    names: ExpertNames
    num_experts: int
    num_active: int
    intermediate_size: int
    shared_intermediate_size: int | None
    """Intermediate size of the expert that every token has."""
    adds_to_one: bool
    """The shares of a token's experts."""
    gate: Gate
    layers: tuple[bool, ...]
    """Whether each layer has experts; else an MLP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(ModelShape):
    """A decoder of `models.decoder`: E hidden_size, H num_heads."""

    traits: Family
    hidden_size: int
    num_heads: int
    intermediate_size: int
    experts: ExpertConfig | None
    rms_norm_eps: float
    rope: RopeConfig
    local_rope: RopeConfig | None
    """Rope of layers with a window, if it differs from the other layers' rope."""
    rotated: tuple[bool, ...]
    """Whether each layer rotates q and k."""
    tied: bool
    """The output projection is the embedding."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]
    """Sliding window of each layer in tokens, the query itself included; None sees all."""
    embedding_scale: float
    residual_scale: float
    """Factor of what attention and MLP return, before the sum."""
    score_scale: float
    score_cap: float | None
    logit_divisor: float
    logit_cap: float | None


def load_model_config(path: Path, context_tokens: int | None = None) -> ModelConfig:
    """Reads `path/config.json`, or what a GGUF file says. Raises CheckpointError naming the file and the key.

    `context_tokens`: the longest sequence that is served, if that is less than the model's.
    """
    config = read_config(path)
    family = _read_family(config)
    num_layers = config.integer("num_hidden_layers")
    max_position_embeddings = config.integer("max_position_embeddings")
    rope, local_rope = read_ropes(config, max_position_embeddings, family)
    rotated = _read_rotated(config, family, num_layers)
    score_cap, logit_cap = _read_soft_caps(config, family)
    num_heads, num_kv_heads, head_dim = _read_heads(config, family)
    model_context = max_position_embeddings
    if local_rope is None:
        model_context = stretched_context(rope.scaling, max_position_embeddings)
    served_context = min(context_tokens or model_context, model_context)
    if isinstance(rope.scaling, LongRopeScaling):
        rope = replace(rope, scaling=_read_factors(config, rope, head_dim).within(served_context))
    return ModelConfig(
        family=family.name,
        traits=family,
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=config.integer("intermediate_size"),
        experts=_read_experts(config, family, num_layers),
        rms_norm_eps=config.number("rms_norm_eps", family.absent_rms_norm_eps),
        context_tokens=served_context,
        rope=rope,
        local_rope=local_rope,
        rotated=rotated,
        tied=config.flag("tie_word_embeddings", default=family.absent_tied),
        qkv_bias=_read_bias(config, family.qkv_bias, "attention_bias", absent=family.absent_bias),
        output_bias=_read_bias(config, family.output_bias, "attention_bias", absent=family.absent_bias),
        mlp_bias=_read_bias(config, family.mlp_bias, "mlp_bias", absent=False),
        windows=_read_windows(config, family, rotated),
        embedding_scale=config.integer("hidden_size") ** 0.5
        if family.scaled_embedding
        else _read_multiplier(config, family, "embedding_multiplier"),
        residual_scale=_read_multiplier(config, family, "residual_multiplier"),
        score_scale=_read_score_scale(config, family, head_dim),
        score_cap=score_cap,
        logit_divisor=_read_multiplier(config, family, "logits_scaling"),
        logit_cap=logit_cap,
        dtype=read_dtype(config),
    )


def _read_factors(config: ConfigJson, rope: RopeConfig, head_dim: int) -> LongRopeScaling:
    """Reads longrope's factors, a factor for each frequency."""
    scaling, count = rope.scaling, int(head_dim * rope.rotated_share) // 2
    assert isinstance(scaling, LongRopeScaling)
    for factors in (scaling.short_factors, scaling.long_factors):
        if len(factors) != count:
            raise config.error("rope_scaling", f"has {len(factors)} factors for {count} frequencies")
    return scaling


def read_config(path: Path) -> ConfigJson:
    """`path/config.json`, or of a checkpoint that takes images too its language part, or what a GGUF file says."""
    gguf = find_gguf(path)
    if gguf is not None:
        return ConfigJson(gguf, read_gguf(gguf).config())
    return ConfigJson.read(path / CONFIG_FILE).language_part()


def _read_family(config: ConfigJson) -> Family:
    name = config.text("model_type")
    family = FAMILIES.get(name)
    if family is None:
        raise config.error("model_type", f"{name!r} is not supported ({', '.join(FAMILIES)})")
    if config.has("architectures") and family.architecture not in config.texts("architectures"):
        raise config.error("architectures", f"{family.architecture} is the only one served of {name}")
    wanted, key = family.activation.value, family.activation_key
    if config.text(key, wanted).replace("swish", "silu") != wanted:
        raise config.error(key, f"only {wanted} is supported")
    check_causal(config)
    return family


def check_causal(config: ConfigJson) -> None:
    """Raises CheckpointError if tokens would see later ones."""
    for key, causal in (("use_bidirectional_attention", False), ("is_causal", True)):
        if config.flag(key, default=causal) is not causal:
            raise config.error(key, "only causal attention is supported")


def _read_heads(config: ConfigJson, family: Family) -> tuple[int, int, int]:
    """`(num_heads, num_kv_heads, head_dim)`."""
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    absent = None if config.mentions("num_key_value_heads") else family.absent_kv_heads
    num_kv_heads = config.integer("num_key_value_heads", absent or num_heads)
    if num_heads % num_kv_heads:
        raise config.error("num_key_value_heads", f"is {num_kv_heads}, which does not divide {num_heads} heads")
    if not config.has("head_dim") and family.absent_head_dim is None and hidden_size % num_heads:
        raise config.error("num_attention_heads", f"is {num_heads}, which does not divide hidden_size {hidden_size}")
    head_dim = config.integer("head_dim", family.absent_head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise config.error("head_dim", f"is {head_dim}, rotary embedding needs an even one")
    return num_heads, num_kv_heads, head_dim


def _read_experts(config: ConfigJson, family: Family, num_layers: int) -> ExpertConfig | None:
    names = family.experts
    if names is None:
        return None
    count_key = "num_local_experts" if config.has("num_local_experts") else "num_experts"  # transformers writes either
    num_experts, num_active = config.integer(count_key), config.integer("num_experts_per_tok")
    if num_active > num_experts:
        raise config.error("num_experts_per_tok", f"is {num_active} of {num_experts} experts")
    every = config.integer("decoder_sparse_step", 1)
    plain = config.integers("mlp_only_layers") if config.has("mlp_only_layers") else ()
    clamp = ClampedSwiglu(
        config.number("swiglu_alpha", _ABSENT_SWIGLU_ALPHA), config.number("swiglu_limit", _ABSENT_SWIGLU_LIMIT)
    )
    return ExpertConfig(
        names=names,
        num_experts=num_experts,
        num_active=num_active,
        intermediate_size=config.integer(names.size_key),
        shared_intermediate_size=config.integer("shared_expert_intermediate_size") if names.shared else None,
        adds_to_one=config.flag("norm_topk_prob", default=False) if names.adds_to_one is None else names.adds_to_one,
        gate=clamp if names.clamped else family.activation,
        layers=tuple((layer + 1) % every == 0 and layer not in plain for layer in range(num_layers)),
    )


def _read_bias(config: ConfigJson, bias: Bias, key: str, *, absent: bool) -> bool:
    if bias is Bias.NAMED:
        return config.flag("qkv_bias", default=True)
    return bias is Bias.ALWAYS or (bias is Bias.CONFIGURED and config.flag(key, default=absent))


def _read_multiplier(config: ConfigJson, family: Family, key: str) -> float:
    return config.number(key, 1.0) if family.multipliers else 1.0


def _read_score_scale(config: ConfigJson, family: Family, head_dim: int) -> float:
    if family.multipliers:
        return config.number("attention_multiplier", 1.0)
    divisor = config.number("query_pre_attn_scalar", _ABSENT_QUERY_SCALAR) if family.query_scale else head_dim
    return float(divisor**-0.5)


def _read_soft_caps(config: ConfigJson, family: Family) -> tuple[float | None, float | None]:
    """Reads the soft caps of scores and of logits."""
    score_key, logit_key = "attn_logit_softcapping", "final_logit_softcapping"
    score_cap, logit_cap = (
        config.number(key) if config.has(key) else None if config.mentions(key) else absent
        for key, absent in zip((score_key, logit_key), family.soft_caps, strict=True)
    )
    if score_cap is not None and family.soft_caps[0] is None:
        raise config.error(score_key, f"{family.name} has none")
    if logit_cap is not None and not family.query_scale:
        raise config.error(logit_key, f"{family.name} has none")
    return score_cap, logit_cap


def _read_rotated(config: ConfigJson, family: Family, num_layers: int) -> tuple[bool, ...]:
    if not family.unrotated:
        return (True,) * num_layers
    if not config.has("no_rope_layers"):
        interval = config.integer("no_rope_layer_interval", _ABSENT_NO_ROPE_INTERVAL)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    rotated = config.integers("no_rope_layers")
    if len(rotated) != num_layers or set(rotated) - {0, 1}:
        raise config.error("no_rope_layers", f"is not 0 or 1 for each of {num_layers} layers")
    return tuple(map(bool, rotated))


def _read_windows(config: ConfigJson, family: Family, rotated: tuple[bool, ...]) -> tuple[int | None, ...]:
    num_layers = len(rotated)
    if family.windows in {Windows.BY_LAYER, Windows.UNROTATED}:
        used = config.flag("use_sliding_window", default=False)
        window = _read_window(config, family) if used else None
        if family.windows is Windows.UNROTATED and not (used and config.has("layer_types")):
            return tuple(None if turns else window for turns in rotated)
        return _read_layer_windows(config, num_layers, window)
    if family.windows in {Windows.TYPED, Windows.PATTERN} and config.has("layer_types"):
        return _read_layer_windows(config, num_layers, _read_window(config, family))
    if family.windows is Windows.PATTERN:
        window, every = _read_window(config, family), config.integer("sliding_window_pattern", family.global_every)
        return tuple(window if (layer + 1) % every else None for layer in range(num_layers))
    if config.has("layer_types") and len(set(config.texts("layer_types"))) > 1:
        raise config.error("layer_types", f"{family.name} does not mix layer types")
    if family.windows is Windows.SWITCHED and config.flag("use_sliding_window", default=False):
        raise config.error("use_sliding_window", f"windows of {family.name} are not supported")
    if family.windows is Windows.NONE and config.has("sliding_window"):
        raise config.error("sliding_window", f"{family.name} has none")
    if family.windows in {Windows.NONE, Windows.SWITCHED}:
        return (None,) * num_layers
    return (_read_window(config, family),) * num_layers


def _read_window(config: ConfigJson, family: Family) -> int | None:
    if not config.has("sliding_window") and (config.mentions("sliding_window") or family.absent_window is None):
        return None
    return config.integer("sliding_window", family.absent_window)


def _read_layer_windows(config: ConfigJson, num_layers: int, window: int | None) -> tuple[int | None, ...]:
    if not config.has("layer_types"):
        first = config.integer("max_window_layers", _ABSENT_MAX_WINDOW_LAYERS, minimum=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    layer_types = config.texts("layer_types")
    if len(layer_types) != num_layers:
        raise config.error("layer_types", f"has {len(layer_types)} entries for {num_layers} layers")
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise config.error("layer_types", f"{min(unknown)!r} is not supported")
    if "sliding_attention" in layer_types and window is None:
        raise config.error("layer_types", "has sliding_attention, but its window is unset")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def read_dtype(config: ConfigJson) -> DType | None:
    """What the weights were saved as, if the file says so."""
    key = "dtype" if config.has("dtype") else "torch_dtype"
    if not config.has(key):
        return None
    name = config.text(key).removeprefix("torch.")
    if name not in set(DType):
        raise config.error(key, f"{name!r} is not supported ({', '.join(DType)})")
    return DType(name)
