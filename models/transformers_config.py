"""What config.json must not say of a model that transformers computes. Needs neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Mapping

from models.config import check_causal
from models.config_json import ConfigJson
from models.transformers_families import MIXED_WINDOWS, WINDOWED

_ROPES = frozenset({"default", "linear", "llama3", "yarn"})
"""What others turn by follows from the longest text of a batch: a token would depend on its neighbours."""
_ROPES_OF: Mapping[str, frozenset[str]] = {"phi3": frozenset({"default"}), "phimoe": frozenset({"default"})}
"""For which any other means longrope, or is scaled by the longest text."""
_FIXED_ALPHA = "hunyuan_v1_dense"
"""The family that calls a rope `dynamic` whose base is stretched once, by `alpha`."""


def check_transformers_config(config: ConfigJson) -> None:
    """Raises CheckpointError naming the key of what would be computed otherwise than transformers does."""
    family = config.text("model_type")
    check_causal(config)
    _check_windows(config, family)
    for key in ("rope_scaling", "rope_parameters"):
        for rope in (config.section(key), *config.section(key).sections()):
            _check_rope(config, rope, family)


def _check_windows(config: ConfigJson, family: str) -> None:
    """transformers cuts its cache by these keys, even where a family's mask knows nothing of them."""
    for key in ("attention_chunk_size",) if family in WINDOWED else ("attention_chunk_size", "sliding_window"):
        if config.has(key):
            raise config.error(key, f"{family} has none")
    kinds = set(config.texts("layer_types")) if config.has("layer_types") else set()
    unknown = kinds - {"full_attention", "sliding_attention"}
    if unknown:
        raise config.error("layer_types", f"{min(unknown)!r} is not supported")
    if family not in WINDOWED and "sliding_attention" in kinds:
        raise config.error("layer_types", f"{family} has no windows")
    if family not in MIXED_WINDOWS and len(kinds) > 1:
        raise config.error("layer_types", f"{family} does not mix layer types")


def _check_rope(config: ConfigJson, rope: ConfigJson, family: str) -> None:
    kind = rope.text("rope_type", rope.text("type", "default"))
    if family == _FIXED_ALPHA and kind == "dynamic" and rope.has("alpha"):
        rope.number("alpha")
        config.integer("head_dim")
    elif kind not in _ROPES_OF.get(family, _ROPES):
        raise rope.error("rope_type", f"{kind!r} is not supported where transformers computes {family}")
