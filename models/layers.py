"""The pieces that a decoder layer is made of: linear map, RMSNorm, gated MLP.

Operations follow transformers in kind and order, so that float32 results agree to the last
bits and bfloat16 rounds in the same places.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F


class Linear:
    """`x @ weight.T + bias`. The one place where a packed form of the weight would live."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight  # [out, in]
        self._bias = bias  # [out]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X `[T, in]` → `[T, out]`."""
        return F.linear(x, self._weight, self._bias)


class RmsNorm:
    """Root mean square norm over the last dimension (arXiv 1910.07467), computed in float32 or wider."""

    __slots__ = ("_eps", "_weight")

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight  # [E], or [heads, D] to norm heads with weights of their own
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X `[..., E]` → same shape and dtype."""
        wide = x if x.dtype == torch.float64 else x.to(torch.float32)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        return self._weight * normed.to(x.dtype)


class GatedMlp:
    """`down(silu(gate(x)) * up(x))`; gate and up are one matrix."""

    __slots__ = ("_down", "_gate_up")

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self._gate_up = gate_up  # [2 * intermediate, E]
        self._down = down  # [E, intermediate]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X `[T, E]` → `[T, E]`."""
        gate, up = self._gate_up(x).chunk(2, dim=-1)  # [T, intermediate] each
        return self._down(F.silu(gate) * up)
