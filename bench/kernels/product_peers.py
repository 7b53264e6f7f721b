"""What the CPU's products are measured against: the same kernels at other tiers, and oneDNN over packed weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.cpu.library import Library
from kernels.cpu.operations import CpuOperations
from kernels.cpu.tiers import machine_tiers
from kernels.operations import LinearMap

_PACKED_FOR_TOKENS = 512
"""The batch that oneDNN lays weights out for: as fast as any other at few tokens, fastest from 64 on."""


class MakesLinear(Protocol):
    """The part of `Operations` that products need."""

    @property
    def name(self) -> str:
        """As the table calls it."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearMap:
        """As `Operations.linear`."""


class OneDnn:
    """Products of oneDNN in bfloat16, each weight in its own layout."""

    name = "onednn"

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearMap:
        """Raises RuntimeError where this processor or build of torch has no such layout."""
        return _OneDnnLinear(torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_TOKENS), bias)


@dataclass(frozen=True, slots=True, eq=False)
class _OneDnnLinear:
    packed: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.packed, self.bias, "none", [], "")
        return out


def has_one_dnn() -> bool:
    """Whether oneDNN multiplies bfloat16 on this processor: not on one with AVX2 alone."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def other_tiers(chosen: str) -> list[MakesLinear]:
    """Every tier that this machine runs but the operations called `chosen`, best first."""
    every = (CpuOperations(Library(tier)) for tier in reversed(machine_tiers()))
    return [operations for operations in every if operations.name != chosen]
