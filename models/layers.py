"""The pieces that a decoder layer is made of: linear map, RMSNorm, gated MLP.

Each is weights and the operation on them (`kernels.operations`); how it is computed is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kernels.operations import LinearMap, Operations


@dataclass(frozen=True, slots=True, eq=False)
class RmsNorm:
    """Root mean square norm over the last dimension."""

    weight: torch.Tensor  # [E]
    eps: float
    operations: Operations

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X `[T, E]` → `[T, E]`."""
        return self.operations.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Adds x `[T, E]` to `residual` in place and returns the sum's norm."""
        return self.operations.add_rms_norm(x, residual, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class NoNorm:
    """In the place of a norm, where a family has none."""

    weight: ClassVar[torch.Tensor | None] = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns `x` unchanged."""
        return x

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Adds x `[T, E]` to `residual` in place and returns the sum."""
        return residual.add_(x)


@dataclass(frozen=True, slots=True, eq=False)
class GatedMlp:
    """`down(activation(gate(x)) * up(x))`; gate and up are one matrix."""

    gate_up: LinearMap  # [2 * I, E] and the gate
    down: LinearMap  # [E, I]
    intermediate_size: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X `[T, E]` → `[T, E]`."""
        return self.down(self.gate_up(x))  # [T, I] → [T, E]
