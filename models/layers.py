"""The pieces that a decoder layer is made of: linear map, RMSNorm, gated MLP.

Each is weights and the operation on them (`kernels.operations`); how it is computed is not known here.
"""

from __future__ import annotations

import torch

from kernels.operations import LinearMap, Operations


class RmsNorm:
    """Root mean square norm over the last dimension."""

    __slots__ = ("_eps", "_operations", "_weight")

    def __init__(self, weight: torch.Tensor, eps: float, operations: Operations) -> None:
        self._weight = weight  # [E]
        self._eps = eps
        self._operations = operations

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X `[T, E]` → `[T, E]`."""
        return self._operations.rms_norm(x, self._weight, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Adds x `[T, E]` to `residual` in place and returns the sum's norm."""
        return self._operations.add_rms_norm(x, residual, self._weight, self._eps)


class GatedMlp:
    """`down(silu(gate(x)) * up(x))`; gate and up are one matrix."""

    __slots__ = ("_down", "_gate_up")

    def __init__(self, gate_up: LinearMap, down: LinearMap) -> None:
        self._gate_up = gate_up  # [2 * I, E] and the activation
        self._down = down  # [E, I]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X `[T, E]` → `[T, E]`."""
        return self._down(self._gate_up(x))  # [T, I] → [T, E]
