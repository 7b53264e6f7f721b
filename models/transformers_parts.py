"""What takes the place of single modules of transformers' models: linear maps and norms of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import nn

from kernels.operations import LinearMap, Operations

Pack: TypeAlias = Callable[[torch.Tensor, torch.Tensor | None], LinearMap]
"""Makes a linear map of weight `[out, in]` and bias `[out]`."""


class Replacement(nn.Module):
    """A module of ours, called without the hooks that torch looks for at each of its own: 3 µs of a step's call."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `forward`."""
        computed: torch.Tensor = self.forward(x)
        return computed


class Mapped(Replacement):
    """A linear map of ours in the place of theirs."""

    def __init__(self, linear: LinearMap, num_outputs: int) -> None:
        super().__init__()
        self.linear = linear
        self.num_outputs = num_outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X `[…, in]` → `[…, out]`."""
        return self.linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self.num_outputs)


class Norm(Replacement):
    """RMSNorm by our operations."""

    def __init__(self, weight: torch.Tensor, eps: float, operations: Operations) -> None:
        super().__init__()
        self.scale = weight
        self.eps = eps
        self.operations = operations

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X `[…, E]` → `[…, E]`."""
        return self.operations.rms_norm(x.reshape(-1, x.shape[-1]), self.scale, self.eps).view(x.shape)
