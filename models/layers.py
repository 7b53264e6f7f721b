"""The pieces that a decoder layer is made of: linear map, RMSNorm, gated MLP.

Each is weights and the operation on them (`kernels.operations`); how it is computed is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from kernels.operations import LinearMap, Operations


@dataclass(frozen=True, slots=True, eq=False)
class RmsNorm:
    """Root mean square norm over the last dimension.

    A weight wider than x, such as one that was not rounded after an offset, is multiplied before anything is rounded.
    """

    weight: torch.Tensor  # [E]
    eps: float
    operations: Operations

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X `[T, E]` → `[T, E]`."""
        if x.dtype is not self.weight.dtype:
            return self.operations.rms_norm(x.to(self.weight.dtype), self.weight, self.eps).to(x.dtype)
        return self.operations.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Adds x `[T, E]` to `residual` in place and returns the sum's norm."""
        if x.dtype is not self.weight.dtype:
            return self(residual.add_(x))
        return self.operations.add_rms_norm(x, residual, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class NoNorm:
    """In the place of a norm, where a family has none."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X as it is."""
        return x

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Adds x `[T, E]` to `residual` in place and returns the sum."""
        return residual.add_(x)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gelu(gate) * up`, gelu by its approximation with tanh, for `gate_up` `[T, 2 * I]`, gate first → `[T, I]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """`(up + 1) * gate * sigmoid(alpha * gate)`, of gates up to `limit` and ups within it (gpt-oss)."""

    alpha: float
    limit: float

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`gate_up` `[T, 2 * I]`, gate first → `[T, I]`; computed in float32."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return ((up + 1) * (gate * torch.sigmoid(gate * self.alpha))).to(gate_up.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class GatedMlp:
    """`down(activation(gate(x)) * up(x))`; gate and up are one matrix."""

    gate_up: LinearMap  # [2 * I, E] and the activation
    down: LinearMap  # [E, I]
    intermediate_size: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X `[T, E]` → `[T, E]`."""
        return self.down(self.gate_up(x))  # [T, I] → [T, E]
