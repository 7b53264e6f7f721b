"""The `triton` operations: fused kernels for norms, rotation with KV store and activation; linear maps by cuBLAS."""

from __future__ import annotations

import torch

from kernels.operations import ActivatedLinear, LinearMap, PlainLinear, QkNorm
from kernels.triton.activation import silu_mul
from kernels.triton.blocks import copy_blocks
from kernels.triton.norm import add_rms_norm, rms_norm
from kernels.triton.rotary import rotate_and_store


class TritonOperations:
    """Implements `kernels.operations.Operations`; nothing synchronizes, so CUDA graphs can capture every call."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """As the log calls it."""
        return "triton"

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearMap:
        """See `Operations.linear`; keeps the weight as it is, which is how cuBLAS reads it."""
        return PlainLinear(weight, bias)

    def gated_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearMap:
        """See `Operations.gated_linear`; two operations, so gate and up are rounded too."""
        return ActivatedLinear(self.linear(weight, bias), self.silu_mul)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Operations.rms_norm`."""
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Operations.add_rms_norm`."""
        return add_rms_norm(x, residual, weight, eps)

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        qk_norm: QkNorm | None,
        kv_layer: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """See `Operations.rotate_and_store`."""
        rotate_and_store(qkv, cos, sin, qk_norm, kv_layer, slot_mapping)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `Operations.silu_mul`."""
        return silu_mul(gate_up)

    def copy_blocks(self, pool: torch.Tensor, pairs: torch.Tensor) -> None:
        """See `Operations.copy_blocks`."""
        copy_blocks(pool, pairs)
