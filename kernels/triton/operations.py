"""The `triton` operations: fused kernels for norms, rotation with KV store, activation and quantised linear maps.

Plain linear maps are left to cuBLAS.
"""

from __future__ import annotations

import torch

from kernels.grouped import GroupedMap, PlainGrouped
from kernels.operations import LinearMap, Operations, PlainLinear, QkNorm, Rotation
from kernels.quantized import QuantizedWeight, dequantized
from kernels.triton.activation import silu_mul
from kernels.triton.blocks import copy_blocks
from kernels.triton.configs import arch_of
from kernels.triton.grouped import GroupedLinear
from kernels.triton.norm import add_rms_norm, rms_norm
from kernels.triton.quantized import HeldWeight, QuantizedLinear, can_keep
from kernels.triton.rotary import rotate_and_store
from kernels.triton.rounding import FP8_ARCH, RoundingLinear, can_round


class TritonOperations(Operations):
    """Implements `kernels.operations.Operations`; nothing synchronizes, so CUDA graphs can capture every call."""

    name = "triton"

    def __init__(self, *, is_rounding: bool = False) -> None:
        self._is_rounding = is_rounding

    def rounding(self, device: torch.device) -> TritonOperations | None:
        """See `Operations.rounding`; on a CPU for tests."""
        has_products = device.type == "cpu" or arch_of(device) >= FP8_ARCH
        return TritonOperations(is_rounding=True) if has_products else None

    def rounds(self, weight: QuantizedWeight) -> bool:
        """See `Operations.rounds`."""
        return self._is_rounding and can_round(weight)

    def keeps(self, weight: QuantizedWeight) -> bool:
        """See `Operations.keeps`: all but groups of odd sizes."""
        return can_keep(weight)

    def linear(self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None) -> LinearMap:
        """See `Operations.linear`; keeps a plain weight as it is, which is how cuBLAS reads it."""
        if isinstance(weight, QuantizedWeight) and can_keep(weight):
            held = QuantizedLinear(HeldWeight.of(weight), bias)
            return RoundingLinear(held) if self.rounds(weight) else held
        return PlainLinear(dequantized(weight), bias)

    groups_experts = True

    def grouped_linear(
        self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None, num_experts: int
    ) -> GroupedMap | None:
        """See `Operations.grouped_linear`: what is quantised, and bfloat16, which is left to torch."""
        if isinstance(weight, QuantizedWeight) and can_keep(weight):
            return GroupedLinear(HeldWeight.of(weight), bias, num_experts)
        plain = dequantized(weight)
        return PlainGrouped(plain.unflatten(0, (num_experts, -1)), bias) if plain.dtype is torch.bfloat16 else None

    def rotate_and_store(
        self, qkv: torch.Tensor, rotation: Rotation, qk_norm: QkNorm | None, kv_layer: torch.Tensor
    ) -> None:
        """See `Operations.rotate_and_store`; a norm of all heads as one is an operation of its own, and rounds."""
        if qk_norm is not None and qk_norm.is_whole:
            num_rotated = qkv.shape[1] - kv_layer.shape[2]
            num_heads = num_rotated - kv_layer.shape[2]
            parts = (qkv[:, :num_heads], qk_norm.q_weight), (qkv[:, num_heads:num_rotated], qk_norm.k_weight)
            for heads, weight in parts:
                heads.copy_(rms_norm(heads.flatten(1), weight, qk_norm.eps).view_as(heads))
            qk_norm = None
        rotate_and_store(qkv, rotation, qk_norm, kv_layer)

    rms_norm = staticmethod(rms_norm)
    add_rms_norm = staticmethod(add_rms_norm)
    silu_mul = staticmethod(silu_mul)
    copy_blocks = staticmethod(copy_blocks)
