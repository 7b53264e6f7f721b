"""Gates times ups by plain torch: an operation of its own, where no linear map has it inside."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F

from kernels.gates import Activation, ClampedSwiglu, Gate

GateProduct = Callable[[torch.Tensor], torch.Tensor]
"""`[T, 2 * I]`, gates first → `[T, I]`."""


def gate_product(gate: Gate, silu_mul: GateProduct) -> GateProduct:
    """By the kind of gate; `silu_mul`: that of SiLU."""
    if isinstance(gate, ClampedSwiglu):
        return partial(_clamped_swiglu, gate)
    return silu_mul if gate is Activation.SILU else _gelu_tanh_mul


def _gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def _clamped_swiglu(clamp: ClampedSwiglu, gate_up: torch.Tensor) -> torch.Tensor:
    """Computed in float32."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return ((up + 1) * (gate * torch.sigmoid(gate * clamp.alpha))).to(gate_up.dtype)
