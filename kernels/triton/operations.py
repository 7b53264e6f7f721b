"""The `triton` operations: fused kernels for norms, rotation with KV store, activation and quantised linear maps.

Plain linear maps are left to cuBLAS.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.operations import ActivatedLinear, LinearMap, PlainLinear, Routing
from kernels.quantized import QuantizedWeight, dequantized
from kernels.triton.activation import silu_mul
from kernels.triton.blocks import copy_blocks
from kernels.triton.norm import add_rms_norm, rms_norm
from kernels.triton.quantized import QuantizedLinear, can_keep
from kernels.triton.rotary import rotate_and_store


class TritonOperations:
    """Implements `kernels.operations.Operations`; nothing synchronizes, so CUDA graphs can capture every call."""

    name = "triton"

    def keeps(self, weight: QuantizedWeight) -> bool:
        """See `Operations.keeps`: all but groups of odd sizes."""
        return can_keep(weight)

    def linear(self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None) -> LinearMap:
        """See `Operations.linear`; keeps a plain weight as it is, which is how cuBLAS reads it."""
        if isinstance(weight, QuantizedWeight) and can_keep(weight):
            return QuantizedLinear.of(weight, bias)
        return PlainLinear(dequantized(weight), bias)

    def gated_linear(self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None) -> LinearMap:
        """See `Operations.gated_linear`; two operations, so gate and up are rounded too."""
        return ActivatedLinear(self.linear(weight, bias), self.silu_mul)

    def experts(self, router: LinearMap, mlps: Sequence[tuple[LinearMap, LinearMap]], routing: Routing) -> None:
        """See `Operations.experts`: one by one."""

    rms_norm = staticmethod(rms_norm)
    add_rms_norm = staticmethod(add_rms_norm)
    rotate_and_store = staticmethod(rotate_and_store)
    silu_mul = staticmethod(silu_mul)
    copy_blocks = staticmethod(copy_blocks)
