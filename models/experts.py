"""Mixture of experts in the place of an MLP: a router gives each token to a few gated MLPs, whose results are added.

A token's result depends on that token alone: its experts are added in ascending order, whatever else is in the batch.
On CPUs only the experts that a batch needs are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.gate_products import GateProduct
from kernels.grouped import ExpertRows, GroupedMap
from kernels.operations import ExpertMaps, LinearMap, Routing
from models.layers import GatedMlp


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """Chooses experts and their shares."""

    scores: LinearMap  # [X, E]
    routing: Routing

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """X `[T, E]` → expert ids `[T, K]` int64, ascending in each row, and their shares `[T, K]` float32."""
        shares, ids = torch.topk(torch.softmax(self.scores(x).float(), dim=-1), self.routing.num_active, dim=-1)
        if self.routing.adds_to_one:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        ids, order = torch.sort(ids, dim=-1)
        return ids, shares.gather(-1, order)


class Experts(Protocol):
    """The gated MLPs of a layer."""

    @property
    def waits_for_device(self) -> bool:
        """See `GroupedMap.waits_for_device`."""

    def __call__(self, x: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """X `[M, E]`, of each row its expert `[M]`, ascending → `[M, E]`, or as many E as segments if split."""


@dataclass(frozen=True, slots=True, eq=False)
class SeparateExperts:
    """One linear map after the other, of those experts that have rows. Weights of any form."""

    experts: tuple[GatedMlp, ...]
    waits_for_device: bool = True

    def __call__(self, x: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """See `Experts`."""
        if not len(x):
            return x
        found, counts = torch.unique_consecutive(expert_ids, return_counts=True)
        parts = torch.split(x, counts.tolist())
        computed = [self.experts[expert](rows) for expert, rows in zip(found.tolist(), parts, strict=True)]
        return torch.cat(computed)


@dataclass(frozen=True, slots=True, eq=False)
class GroupedExperts:
    """Experts in two products, for GPUs: the host does not learn which expert got which rows."""

    gate_up: GroupedMap  # [X, 2 * I, E]
    down: GroupedMap  # [X, E, I]
    activate: GateProduct
    num_experts: int

    @property
    def waits_for_device(self) -> bool:
        """See `Experts`."""
        return self.gate_up.waits_for_device or self.down.waits_for_device

    def __call__(self, x: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """See `Experts`."""
        rows = ExpertRows.of(expert_ids, self.num_experts)
        return self.down(self.activate(self.gate_up(x, rows)), rows)


@dataclass(frozen=True, slots=True, eq=False)
class SharedExpert:
    """An expert that every token has, by a share of its own."""

    mlp: GatedMlp
    gate: LinearMap  # [1, E]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X `[T, E]` → `[T, E]` float32."""
        return torch.sigmoid(self.gate(x).float()) * self.mlp(x).float()


@dataclass(frozen=True, slots=True, eq=False)
class RoutedExperts:
    """The router, then the experts: implements `kernels.operations.ExpertMaps` on any device."""

    router: Router
    experts: Experts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `ExpertMaps`."""
        ids, shares = self.router(x)  # [T, K]
        by_expert, order = torch.sort(ids.flatten(), stable=True)  # [T * K]
        computed = self.experts(x[order // ids.shape[1]], by_expert)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        parts = computed[back].view(*ids.shape, computed.shape[1]).float() * shares[..., None]  # [T, K, E]
        total = parts[:, 0]
        for rank in range(1, ids.shape[1]):  # in this order, which a sum over the dimension does not promise
            total = total + parts[:, rank]
        return total


@dataclass(frozen=True, slots=True, eq=False)
class MixtureOfExperts:
    """The MLP of a layer with experts."""

    experts: RoutedExperts | ExpertMaps
    shared: SharedExpert | None = None

    @property
    def waits_for_device(self) -> bool:
        """See `Experts`."""
        return isinstance(self.experts, RoutedExperts) and self.experts.experts.waits_for_device

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X `[T, E]` → `[T, E]`. Added in float32, rounded once."""
        total = self.experts(x)
        if self.shared is not None:
            total = total + self.shared(x)
        return total.to(x.dtype)
