"""The operations of a decoder layer written out in float64: what every implementation is compared with.

Each rounds only where it stores: a residual in place, and the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kernels.gates import Activation, ClampedSwiglu, Gate
from kernels.operations import Operations, QkNorm
from kernels.operations import Rotation as SharedRotation
from tests.kernels.oracle import moved, named

TOLERANCES = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Bound on the error of one output element, absolute and relative, of normal inputs, where an implementation
rounds once: half a unit in the last place of bfloat16 and float16, a few of float32 for what it sums."""


GATES = (*Activation, ClampedSwiglu(1.702, 2.5))
"""One of each kind."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / rms(x) * weight` over the last dimension, float64."""
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum, rounded to the dtype of `residual`, and its norm in float64."""
    total = (x.double() + residual.double()).to(residual.dtype)
    return total, rms_norm(total, weight, eps)


def gate_mul(gate_up: torch.Tensor, kind: Gate = Activation.SILU) -> torch.Tensor:
    """Activated gates times ups, float64."""
    gate, up = gate_up.double().chunk(2, -1)
    if isinstance(kind, ClampedSwiglu):
        gate, up = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit)
        return gate * (kind.alpha * gate).sigmoid() * (up + 1)
    if kind is Activation.GELU_TANH:
        return gate * (1 + torch.tanh((2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3))) / 2 * up
    return gate * gate.sigmoid() * up


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns the pairs (i, i + D / 2) of each head of x `[T, heads, D]` by the angles of cos, sin `[T, D / 2]`."""
    low, high = x.double().chunk(2, -1)
    cos, sin = cos.double()[:, None], sin.double()[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def check_copy_blocks(operations, device: torch.device | str = "cpu") -> None:
    """Runs `copy_blocks` at block sizes around those of the implementations' pieces; targets alone have changed."""
    generator = torch.Generator().manual_seed(0)
    for block_bytes in (8, 1000, 64 * 1024, 150_008):
        pool = torch.randint(256, (11, block_bytes), dtype=torch.uint8, generator=generator)
        expected = pool.clone()
        expected[[7, 0, 3, 10]] = pool[[2, 8, 2, 9]]
        copied = pool.to(device)
        operations.copy_blocks(copied, torch.tensor([[2, 7], [8, 0], [2, 3], [9, 10]], device=device))
        assert torch.equal(copied.cpu(), expected)
        operations.copy_blocks(copied, torch.empty(0, 2, dtype=torch.int64, device=device))
        assert torch.equal(copied.cpu(), expected)


@dataclass
class Rotation:
    """Arguments of `rotate_and_store` over a pool that is NaN wherever nothing is stored."""

    qkv: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    qk_norm: QkNorm | None
    pool: torch.Tensor
    slot_mapping: torch.Tensor

    @classmethod
    def make(
        cls, num_tokens, heads, head_dim, block_size, dtype, *, normed=False, is_whole=False, is_wide=False, seed=0
    ):
        """`heads` = (query heads, KV heads). Every fifth token has no slot; all tensors are views into larger ones.

        `is_whole`, `is_wide`: of the norm, if there is one; see `QkNorm`.
        """
        generator = torch.Generator().manual_seed(seed)
        num_heads, num_kv_heads = heads

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        qkv = normal(num_tokens, num_heads + 2 * num_kv_heads + 1, head_dim + 8).to(dtype)[:, 1:, :head_dim]
        angles = normal(num_tokens, head_dim) * 3
        cos, sin = (side.to(torch.float32)[:, : head_dim // 2] for side in (angles.cos(), angles.sin()))
        weights = [1 + 0.2 * normal(head_dim * (count if is_whole else 1)) for count in heads]
        q_weight, k_weight = (weight.to(torch.float32 if is_wide else dtype) for weight in weights)
        qk_norm = QkNorm(q_weight, k_weight, 1e-6, is_whole) if normed else None
        num_blocks = -(-num_tokens // block_size) + 2
        pool = torch.full((num_blocks, 2, 2, num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
        slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens]
        slots[::5] = -1
        return cls(qkv, cos, sin, qk_norm, pool, slots)

    @property
    def kv_layer(self) -> torch.Tensor:
        """A strided view, as a layer of the pool is."""
        return self.pool[:, 1]

    @property
    def rotation(self) -> SharedRotation:
        """What the layers of a step share."""
        return SharedRotation(self.cos, self.sin, self.slot_mapping)

    def to(self, device: torch.device | str) -> Rotation:
        """The same on another device."""
        norm = self.qk_norm
        if norm is not None:
            norm = replace(norm, q_weight=norm.q_weight.to(device), k_weight=norm.k_weight.to(device))
        views = (moved(tensor, device) for tensor in (self.qkv, self.cos, self.sin))
        return Rotation(*views, norm, self.pool.to(device), self.slot_mapping.to(device))

    def check(self, operations: Operations, tolerance: float) -> None:
        """Runs `rotate_and_store`; q, k, v and the pool are within `tolerance` of float64, all else is untouched."""
        self.check_each([operations], tolerance)

    def check_each(self, sets: Sequence[Operations], tolerance: float) -> None:
        """As `check`, each of `sets` on the same arguments, by its name."""
        num_kv_heads = self.kv_layer.shape[2]
        num_heads = self.qkv.shape[1] - 2 * num_kv_heads
        qkv, pool = self.qkv.clone(), self.pool.clone()
        expected = self._rotated(*qkv.split((num_heads, num_kv_heads, num_kv_heads), 1))
        for operations in sets:
            self.qkv.copy_(qkv)
            self.pool.copy_(pool)
            operations.rotate_and_store(self.qkv, self.rotation, self.qk_norm, self.kv_layer)
            message = named(operations.name)
            torch.testing.assert_close(self.qkv.double(), expected, atol=tolerance, rtol=tolerance, msg=message)
            stored = self._stored_into(pool, self.qkv[:, num_heads:])  # what was computed must lie in the pool
            torch.testing.assert_close(self.pool, stored, atol=0, rtol=0, equal_nan=True, msg=message)

    def _rotated(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """In float64, q and k normed before if they are to be."""
        if self.qk_norm is not None:
            q, k = (
                rms_norm(each.flatten(1) if self.qk_norm.is_whole else each, weight, self.qk_norm.eps).view_as(each)
                for each, weight in ((q, self.qk_norm.q_weight), (k, self.qk_norm.k_weight))
            )
        return torch.cat((rotate(q, self.cos, self.sin), rotate(k, self.cos, self.sin), v.double()), 1)

    def _stored_into(self, pool: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
        """A copy of `pool` in which `[T, 2 * Hkv, D]` lies in the slots of its tokens."""
        num_kv_heads, block_size = self.kv_layer.shape[2:4]
        is_kept = self.slot_mapping >= 0
        slots = self.slot_mapping[is_kept]
        stored = pool.clone()
        stored[slots // block_size, 1, :, :, slots % block_size] = keys_values[is_kept].unflatten(1, (2, num_kv_heads))
        return stored
