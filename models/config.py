"""What a decoder's shape is, read from config.json of a Hugging Face folder. Needs no torch.

Strict: a key that would change the computation and is not understood is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from models.config_json import ConfigJson
from models.family import FAMILIES, Bias, Family, Windows
from models.rope_config import RopeConfig, read_rope, stretched_context
from tandem.gguf import find_gguf, read_gguf
from tandem.kv_layout import DType

CONFIG_FILE = "config.json"

# What transformers assumes where config.json is silent; null is not silence.
_ABSENT_WINDOW = 4096
_ABSENT_MAX_WINDOW_LAYERS = 28


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What is known of any decoder: L num_layers, Hkv num_kv_heads, D head_dim, V vocab_size."""

    family: str
    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    context_tokens: int
    """Longest sequence, as far as rope scaling stretches it."""
    dtype: DType | None
    """What the weights were saved as, if config.json says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(ModelShape):
    """A decoder of `models.decoder`: E hidden_size, H num_heads."""

    hidden_size: int
    num_heads: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    tied: bool
    """The output projection is the embedding."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    """Sliding window of each layer in tokens, the query itself included; None sees all."""


def load_model_config(path: Path) -> ModelConfig:
    """Reads `path/config.json`, or what a GGUF file says. Raises CheckpointError naming the file and the key."""
    config = read_config(path)
    family = _read_family(config)
    num_layers = config.integer("num_hidden_layers")
    max_position_embeddings = config.integer("max_position_embeddings")
    rope = read_rope(config, max_position_embeddings)
    num_heads, num_kv_heads, head_dim = _read_heads(config, family)
    return ModelConfig(
        family=family.name,
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=config.integer("intermediate_size"),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        context_tokens=stretched_context(rope.scaling, max_position_embeddings),
        rope=rope,
        tied=config.flag("tie_word_embeddings", default=False),
        qkv_bias=_read_bias(config, family.qkv_bias, "attention_bias"),
        output_bias=_read_bias(config, family.output_bias, "attention_bias"),
        mlp_bias=_read_bias(config, family.mlp_bias, "mlp_bias"),
        qk_norm=family.qk_norm,
        windows=_read_windows(config, family, num_layers),
        dtype=read_dtype(config),
    )


def read_config(path: Path) -> ConfigJson:
    """`path/config.json`, or what a GGUF file says in its place."""
    gguf = find_gguf(path)
    return ConfigJson.read(path / CONFIG_FILE) if gguf is None else ConfigJson(gguf, read_gguf(gguf).config())


def _read_family(config: ConfigJson) -> Family:
    name = config.text("model_type")
    family = FAMILIES.get(name)
    if family is None:
        raise config.error("model_type", f"{name!r} is not supported ({', '.join(FAMILIES)})")
    if config.has("architectures") and family.architecture not in config.texts("architectures"):
        raise config.error("architectures", f"{family.architecture} is the only one served of {name}")
    if config.text("hidden_act", "silu") not in {"silu", "swish"}:
        raise config.error("hidden_act", "only silu is supported")
    return family


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


def _read_bias(config: ConfigJson, bias: Bias, key: str) -> bool:
    return bias is Bias.ALWAYS or (bias is Bias.CONFIGURED and config.flag(key, default=False))


def _read_windows(config: ConfigJson, family: Family, num_layers: int) -> tuple[int | None, ...]:
    if family.windows is Windows.BY_LAYER:
        window = _read_window(config) if config.flag("use_sliding_window", default=False) else None
        return _read_layer_windows(config, num_layers, window)
    if family.windows is Windows.TYPED and config.has("layer_types"):
        return _read_layer_windows(config, num_layers, _read_window(config))
    if config.has("layer_types") and len(set(config.texts("layer_types"))) > 1:
        raise config.error("layer_types", f"{family.name} does not mix layer types")
    if family.windows is Windows.NONE:
        if config.has("sliding_window"):
            raise config.error("sliding_window", f"{family.name} has none")
        return (None,) * num_layers
    return (_read_window(config),) * num_layers


def _read_window(config: ConfigJson) -> int | None:
    if config.mentions("sliding_window") and not config.has("sliding_window"):
        return None
    return config.integer("sliding_window", _ABSENT_WINDOW)


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
