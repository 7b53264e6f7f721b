"""Rotary position embedding as config.json states it, in the old form and the new.

Old: `rope_scaling` beside `rope_theta`; new: `rope_parameters` holding both. Where several say
the same, transformers 5.23 decides and this follows: `rope_scaling` before `rope_parameters`,
a `rope_theta` inside before one outside. Knows no tensors; frequencies are in `models/rope.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from models.config_json import ConfigJson
from models.family import Family


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All frequencies divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """The base grows with the length once the length exceeds `original_context_tokens` (NTK)."""

    factor: float
    original_context_tokens: int


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, those between blended (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_tokens: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Interpolation by parts with an attention temperature (YaRN, arXiv 2309.00071)."""

    factor: float
    original_context_tokens: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float
    """Multiplies cos and sin."""


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Each frequency divided by a factor of its own (LongRoPE, arXiv 2402.13753).

    A checkpoint has two lists, for texts within the context that it was first trained on and for longer ones.
    transformers takes one of them for each forward pass, by its longest text, which a KV cache cannot follow: here one
    is chosen at start, by the context that is served.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    is_long: bool
    """Which of the two is taken."""
    original_context_tokens: int
    attention_factor: float
    """Multiplies cos and sin."""

    @property
    def factors(self) -> tuple[float, ...]:
        """Factors in use."""
        return self.long_factors if self.is_long else self.short_factors

    def within(self, context_tokens: int) -> LongRopeScaling:
        """Where no text is longer than that."""
        return replace(self, is_long=context_tokens > self.original_context_tokens)


RopeScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Base period and scaling; None is the plain embedding."""

    theta: float
    scaling: RopeScaling | None
    rotated_share: float = 1.0
    """Share of a head's dimensions that are rotated."""


def stretched_context(scaling: RopeScaling | None, max_position_embeddings: int) -> int:
    """Tokens that the scaled embedding reaches; llama3's `max_position_embeddings` is already that."""
    match scaling:
        case LinearScaling(factor=factor) | DynamicScaling(factor=factor):
            return int(max_position_embeddings * factor)
        case YarnScaling(factor=factor, original_context_tokens=original):
            return int(original * factor)
        case _:
            return max_position_embeddings


def read_ropes(
    config: ConfigJson, max_position_embeddings: int, family: Family
) -> tuple[RopeConfig, RopeConfig | None]:
    """Reads the rope keys of config.json: that of all layers, or of global and of local ones (`Family.local_theta`).

    Raises CheckpointError naming the key.
    """
    rope = config.section("rope_scaling" if config.has("rope_scaling") else "rope_parameters")
    if family.scaled_rope and not rope.mentions("rope_type") and not rope.mentions("type"):
        raise config.error("rope_scaling", f"is missing, which {family.name} needs")
    local_theta = family.local_theta
    if local_theta is None:
        for layer_type in ("full_attention", "sliding_attention"):
            if rope.mentions(layer_type):
                raise rope.error(layer_type, "rope parameters that differ by layer are not supported")
        return _read_rope(config, rope, max_position_embeddings, family), None
    if not rope.mentions("full_attention") and not rope.mentions("sliding_attention"):
        # The old form: what it says of scaling is meant for global layers.
        local = RopeConfig(config.number("rope_local_base_freq", local_theta), None)
        return _read_rope(config, rope, max_position_embeddings, family), local
    ours, local_section = rope.section("full_attention"), rope.section("sliding_attention")
    local = RopeConfig(
        local_section.number("rope_theta", config.number("rope_local_base_freq", local_theta)),
        _read_scaling(config, local_section, max_position_embeddings, family),
    )
    return _read_rope(config, ours, max_position_embeddings, family), local


def _read_rope(config: ConfigJson, rope: ConfigJson, max_position_embeddings: int, family: Family) -> RopeConfig:
    theta = rope.number("rope_theta", config.number("rope_theta", family.absent_theta))
    absent_share = family.rotated_share or 1.0
    share = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", absent_share))
    if share > 1 or (share != 1 and family.rotated_share is None):
        raise config.error("partial_rotary_factor", f"is {share}: {family.name} rotates whole heads")
    scaling = _read_scaling(config, rope, max_position_embeddings, family)
    if share != 1 and isinstance(scaling, DynamicScaling):
        raise rope.error("rope_type", "dynamic scaling of a part of each head is not supported")
    return RopeConfig(theta, scaling, share)


def _read_scaling(
    config: ConfigJson, rope: ConfigJson, max_position_embeddings: int, family: Family
) -> RopeScaling | None:
    rope_type, key = rope.text("rope_type", rope.text("type", "default")), "original_max_position_embeddings"
    # A value outside takes precedence: some checkpoints keep the length of pre-training there.
    original_tokens = (config if config.has(key) else rope).integer(key, max_position_embeddings)
    if family.long_rope_context is not None:
        rope_type = "longrope" if rope_type in {"su", "yarn"} else rope_type
        original_tokens = config.integer(key, family.long_rope_context)
    match rope_type:
        case "default":
            return None
        case "linear":
            return LinearScaling(rope.number("factor"))
        case "dynamic":
            return DynamicScaling(rope.number("factor"), max_position_embeddings)
        case "llama3":
            low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
            if high <= low:
                raise rope.error("high_freq_factor", f"is {high}, not above low_freq_factor {low}")
            return Llama3Scaling(rope.number("factor"), low, high, original_tokens)
        case "yarn":
            return _read_yarn(rope, original_tokens, max_position_embeddings)
        case "longrope":
            return _read_long_rope(rope, original_tokens, max_position_embeddings)
        case _:
            known = "default, linear, dynamic, llama3, yarn, longrope"
            raise rope.error("rope_type", f"{rope_type!r} is not supported ({known})")


def _read_yarn(rope: ConfigJson, original_tokens: int, max_position_embeddings: int) -> YarnScaling:
    factor = rope.number("factor", max_position_embeddings / original_tokens)
    if rope.has("attention_factor"):
        attention_factor = rope.number("attention_factor")
    elif rope.has("mscale") and rope.has("mscale_all_dim"):
        attention_factor = _yarn_mscale(factor, rope.number("mscale")) / _yarn_mscale(
            factor, rope.number("mscale_all_dim")
        )
    else:
        attention_factor = _yarn_mscale(factor, 1.0)
    return YarnScaling(
        factor=factor,
        original_context_tokens=original_tokens,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", default=True),
        attention_factor=attention_factor,
    )


def _read_long_rope(rope: ConfigJson, original_tokens: int, max_position_embeddings: int) -> LongRopeScaling:
    growth = rope.number("factor", max_position_embeddings / original_tokens)
    if rope.has("attention_factor"):
        attention_factor = rope.number("attention_factor")
    elif original_tokens < 2:
        raise rope.error("original_max_position_embeddings", f"is {original_tokens}: no attention_factor follows")
    else:
        attention_factor = 1.0 if growth <= 1 else math.sqrt(1 + math.log(growth) / math.log(original_tokens))
    return LongRopeScaling(
        short_factors=rope.numbers("short_factor"),
        long_factors=rope.numbers("long_factor"),
        is_long=max_position_embeddings > original_tokens,
        original_context_tokens=original_tokens,
        attention_factor=attention_factor,
    )


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
