"""Linear maps of which each rank of a group holds a part: by outputs (gathered) or by inputs (reduced).

A product split by inputs is defined for the whole model, whatever the number of ranks: fixed segments of its inputs,
each summed in float32, added as `tree_sum` adds and rounded once. A rank holds neighbouring segments, a subtree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from kernels.group import Group, tree_sum
from kernels.operations import ExpertMaps, LinearMap, Operations, QkNorm

_EXPERT_ROWS = 64
"""Tokens whose sums by segment are held at once, 8 times what their results take."""


@dataclass(frozen=True, slots=True, eq=False)
class SegmentedLinear:
    """A rank's segments of a product, each a wide map; the bias, if any, is in the first of rank 0."""

    segments: tuple[LinearMap, ...]
    borders: tuple[int, ...]
    """Borders of the segments among the rank's inputs: from 0 on, ascending."""
    added: LinearMap | None = None
    """What `Operations.segment_sum` makes of them."""

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """X `[T, in]` → `[T, out]` float32: the rank's subtree."""
        return tree_sum(self.sums(x)) if self.added is None else self.added(x)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X `[T, in]` → the sums of each segment, one after the other: `[T, segments * out]` float32."""
        return torch.cat(self.sums(x), dim=1)

    def sums(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The sums `[T, out]` of each segment."""
        spans = pairwise(self.borders)
        return [segment(x[:, begin:end]) for segment, (begin, end) in zip(self.segments, spans, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class ReducedLinear:
    """A product split by inputs."""

    linear: SegmentedLinear
    group: Group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X `[T, in of this rank]` → `[T, out]`, the same on all ranks."""
        return self.group.all_reduce(self.linear.total(x)).to(x.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class GatheredLinear:
    """A product split by outputs, of which every rank gets all."""

    linear: LinearMap
    group: Group
    widths: tuple[int, ...]
    """Outputs of each rank."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X `[T, in]` → `[T, sum(widths)]`."""
        return self.group.all_gather(self.linear(x), self.widths)


@dataclass(frozen=True, slots=True, eq=False)
class ReducedExperts:
    """Experts each of which is split inside: implements `ExpertMaps`. One exchange for all of them."""

    experts: ExpertMaps
    """Gives sums by segment, as `SegmentedLinear` does."""
    group: Group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `ExpertMaps`."""
        sums = [self.experts(rows) for rows in torch.split(x, _EXPERT_ROWS)]  # [T, segments * E] each
        return self.group.all_reduce(torch.cat([tree_sum(torch.split(each, x.shape[1], dim=1)) for each in sums]))


@dataclass(frozen=True, slots=True, eq=False)
class NormedHeads:
    """Projection to q, k and v of a rank's heads, with norms that span the heads of all ranks."""

    qkv: LinearMap
    norm: QkNorm
    """Norm of all heads."""
    sizes: Sequence[int]
    """Outputs of q, k and v on each rank."""
    copies: int
    """Ranks that hold the same heads of k."""
    operations: Operations
    group: Group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X `[T, in]` → `[T, sum(sizes)]`, of which q and k are normed."""
        qkv, (q_size, k_size, _) = self.qkv(x), self.sizes
        own = qkv[:, : q_size + k_size].contiguous()
        every = self.group.all_gather(own, [own.shape[1]] * self.group.size).view(len(x), self.group.size, -1)
        sides = (
            (every[:, :, :q_size], self.norm.q_weight, self.group.rank),
            (every[:, :: self.copies, q_size:], self.norm.k_weight, self.group.rank // self.copies),
        )
        normed = [
            self.operations.rms_norm(rows.flatten(1), weight, self.norm.eps).view(rows.shape)[:, place]
            for rows, weight, place in sides
        ]
        return torch.cat((*normed, qkv[:, q_size + k_size :]), dim=1)
