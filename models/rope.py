"""Rotary position embedding: cos and sin of the angles at given positions.

Every frequency is a function of the position alone, so KV that was cached once stays valid
whatever joins the batch, however a prompt is cut into chunks, wherever a seq is resumed.

For `dynamic` (NTK) scaling that is a choice. transformers takes the frequencies of a whole
forward pass from the longest seq in it, and keeps older keys at the frequencies that they were
cached with. Here the token at position p gets those of length p + 1. Both agree on prompts up
to `max_position_embeddings` and on all tokens that one seq generates after them; they differ
on prompts beyond it, where transformers' own result depends on the batch and the chunking.
"""

from __future__ import annotations

import math

import torch

from models.rope_config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    YarnScaling,
)


class RotaryEmbedding:
    """Angles of a model. Float32 throughout, like transformers."""

    __slots__ = ("_dynamic", "_exponents", "_frequencies", "_scales", "_theta")

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device) -> None:
        scaling = config.scaling
        self._theta = config.theta
        num_rotated = rotated_dims(config, head_dim)  # R
        self._exponents = torch.arange(0, num_rotated, 2, dtype=torch.float32) / num_rotated  # [R / 2]
        frequencies = torch.zeros(head_dim // 2)  # what is not rotated has angle 0
        frequencies[: num_rotated // 2] = _frequencies(config, self._exponents)
        self._frequencies = frequencies.to(device)  # [D / 2]
        self._exponents = self._exponents.to(device)
        self._dynamic = scaling if isinstance(scaling, DynamicScaling) else None
        self._scales: torch.Tensor | None = None  # [D / 2]: of what is rotated alone
        if isinstance(scaling, YarnScaling | LongRopeScaling) and scaling.attention_factor != 1.0:
            self._scales = torch.ones(head_dim // 2)
            self._scales[: num_rotated // 2] = scaling.attention_factor
            self._scales = self._scales.to(device)

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cos and sin, each `[T, D / 2]` float32, for `positions` `[T]`."""
        frequencies = self._frequencies if self._dynamic is None else self._dynamic_frequencies(positions)
        angles = positions[:, None].to(torch.float32) * frequencies  # [T, D / 2]
        cos, sin = angles.cos(), angles.sin()
        if self._scales is not None:
            cos, sin = cos * self._scales, sin * self._scales
        return cos, sin

    def _dynamic_frequencies(self, positions: torch.Tensor) -> torch.Tensor:
        """Frequencies of each position's own length: `[T, D / 2]`."""
        assert self._dynamic is not None
        head_dim = 2 * self._exponents.shape[0]
        original, factor = self._dynamic.original_context_tokens, self._dynamic.factor
        lengths = (positions + 1).clamp(min=original)  # [T]
        growth = (factor * lengths / original) - (factor - 1)
        theta = self._theta * growth ** (head_dim / (head_dim - 2))  # [T]
        scaled = 1.0 / theta[:, None] ** self._exponents
        return torch.where(lengths[:, None] > original, scaled, self._frequencies)


class NoRotation(RotaryEmbedding):
    """Rotation of layers that do not rotate q and k: every angle is 0."""

    __slots__ = ()

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ones and zeros, each `[T, D / 2]` float32."""
        ones = torch.ones((len(positions), len(self._frequencies)), device=positions.device)
        return ones, torch.zeros_like(ones)


def rotated_dims(config: RopeConfig, head_dim: int) -> int:
    """R: dimensions of a head that are rotated, the first ones; even."""
    return int(head_dim * config.rotated_share)


def order_of_dims(config: RopeConfig, head_dim: int, *, neighbours: bool) -> torch.Tensor:
    """Which dimension of a checkpoint's head stands at each place of ours `[D]`, where i pairs with i + D / 2.

    In the checkpoint pairs are neighbours, or i and i + R / 2; dimensions from R on, in order, fill the places between.
    Scores stay as they are if q and k have the same order.
    """
    dims, half = torch.arange(head_dim), rotated_dims(config, head_dim) // 2
    rotated, rest = dims[: 2 * half], dims[2 * half :]
    first, second = (rotated[0::2], rotated[1::2]) if neighbours else (rotated[:half], rotated[half:])
    return torch.cat((first, rest[: len(rest) // 2], second, rest[len(rest) // 2 :]))


def _frequencies(config: RopeConfig, exponents: torch.Tensor) -> torch.Tensor:
    """Frequencies `[D / 2]` of a length within the original context."""
    periods = config.theta**exponents
    plain = 1.0 / periods
    match config.scaling:
        case LinearScaling(factor=factor):
            return plain / factor
        case Llama3Scaling() as scaling:
            return _llama3_frequencies(plain, scaling)
        case LongRopeScaling() as scaling:
            return 1.0 / (torch.tensor(scaling.factors) * periods)
        case YarnScaling() as scaling:
            return _yarn_frequencies(periods, config.theta, scaling)
        case _:
            return plain


def _llama3_frequencies(plain: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    wavelengths = 2 * math.pi / plain
    longest_kept = scaling.original_context_tokens / scaling.high_freq_factor
    shortest_divided = scaling.original_context_tokens / scaling.low_freq_factor
    divided = torch.where(wavelengths > shortest_divided, plain / scaling.factor, plain)
    smooth = (scaling.original_context_tokens / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * divided / scaling.factor + smooth * divided
    between = (wavelengths >= longest_kept) & (wavelengths <= shortest_divided)
    return torch.where(between, blended, divided)


def _yarn_frequencies(periods: torch.Tensor, theta: float, scaling: YarnScaling) -> torch.Tensor:
    num_frequencies = periods.shape[0]
    low = _yarn_dimension(scaling.beta_fast, theta, 2 * num_frequencies, scaling)
    high = _yarn_dimension(scaling.beta_slow, theta, 2 * num_frequencies, scaling)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_frequencies - 1)
    if low == high:
        high += 0.001  # no division by zero
    ramp = ((torch.arange(num_frequencies, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return (1.0 / (scaling.factor * periods)) * (1 - kept) + (1.0 / periods) * kept


def _yarn_dimension(num_rotations: float, theta: float, head_dim: int, scaling: YarnScaling) -> float:
    """The dimension that turns `num_rotations` times within the original context (equation in section 3.2)."""
    turns = scaling.original_context_tokens / (num_rotations * 2 * math.pi)
    return (head_dim * math.log(turns)) / (2 * math.log(theta))
