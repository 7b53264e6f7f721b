"""The `reference` operations: plain torch on any device, the oracle of the fast ones.

Each follows transformers in kind and order, so that float32 results agree to the last bits and
bfloat16 rounds in the same places.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from kernels.operations import LinearMap, Operations, PlainLinear, QkNorm, Rotation
from kernels.quantized import QuantizedWeight, dequantized
from kernels.quantized_kv import is_quantized, kv_scales, quantize_rows
from kernels.spec import check_block_pairs, check_rotate_and_store


class ReferenceOperations(Operations):
    """Implements `kernels.operations.Operations`; float64 too."""

    name = "reference"

    def keeps(self, weight: QuantizedWeight) -> bool:
        """See `Operations.keeps`: no form."""
        return False

    def linear(self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None) -> LinearMap:
        """See `Operations.linear`; keeps a plain weight unchanged."""
        return PlainLinear(dequantized(weight), bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Operations.rms_norm`; any number of leading dimensions."""
        wide = x if x.dtype == torch.float64 else x.to(torch.float32)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return (weight * normed.to(weight.dtype)).to(x.dtype)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Operations.add_rms_norm`."""
        return self.rms_norm(residual.add_(x), weight, eps)

    def rotate_and_store(
        self, qkv: torch.Tensor, rotation: Rotation, qk_norm: QkNorm | None, kv_layer: torch.Tensor
    ) -> None:
        """See `Operations.rotate_and_store`."""
        dims = check_rotate_and_store(qkv, rotation, qk_norm, kv_layer)
        num_kv_heads, block_size = dims["Hkv"], dims["S"]
        k_start, v_start = qkv.shape[1] - 2 * num_kv_heads, qkv.shape[1] - num_kv_heads
        q, k, v = qkv[:, :k_start], qkv[:, k_start:v_start], qkv[:, v_start:]  # [T, heads, D] each
        sides = (rotation.cos, rotation.sin)
        cos, sin = (torch.cat((side, side), dim=-1)[:, None].to(qkv.dtype) for side in sides)  # [T, 1, D]
        if qk_norm is not None:
            for heads, weight in ((q, qk_norm.q_weight), (k, qk_norm.k_weight)):
                rows = heads.flatten(1) if qk_norm.is_whole else heads
                heads.copy_(self.rms_norm(rows, weight, qk_norm.eps).view(heads.shape))
        q.copy_(_rotate(q, cos, sin))
        k.copy_(_rotate(k, cos, sin))
        stored = rotation.slot_mapping >= 0
        slots = rotation.slot_mapping[stored]
        where = (slots // block_size, slots % block_size)
        by_slot = kv_layer.permute(1, 0, 3, 2, 4)  # [2, N, S, Hkv, D], a view
        if not is_quantized(kv_layer):
            by_slot[0].index_put_(where, k[stored])
            by_slot[1].index_put_(where, v[stored])
            return
        scales_by_slot = kv_scales(kv_layer).permute(1, 0, 3, 2)  # [2, N, S, Hkv], a view
        for side, rows in enumerate((k[stored], v[stored])):
            values, scales = quantize_rows(rows, kv_layer.dtype)
            by_slot[side].view(torch.int8).index_put_(where, values.view(torch.int8))  # torch moves no e4m3
            scales_by_slot[side].index_put_(where, scales)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `Operations.silu_mul`."""
        gate, up = gate_up.chunk(2, dim=-1)  # [T, I] each
        return F.silu(gate) * up

    def copy_blocks(self, pool: torch.Tensor, pairs: torch.Tensor) -> None:
        """See `Operations.copy_blocks`; by way of a copy."""
        check_block_pairs(pool, pairs)
        pool[pairs[:, 1]] = pool[pairs[:, 0]]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns each head of x `[T, heads, D]`; cos, sin `[T, 1, D]`."""
    half = x.shape[-1] // 2
    quarter_turn = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + quarter_turn * sin
