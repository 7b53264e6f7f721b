"""Mixture of experts in the place of an MLP: a router gives each token to a few gated MLPs, whose results are added.

A token's result depends on that token alone: its experts are added in ascending order, whatever else is in the batch.
On CPUs only the experts that a batch needs are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

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
        """Whether a call reads on the host what a device computed, so that no graph can hold it."""

    def __call__(self, x: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """X `[M, E]`, of each row its expert `[M]`, ascending → `[M, E]`."""


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


_GROUPED_CAPABILITIES = (9, 10)
"""Major ones: `_grouped_mm` of torch 2.11 to 2.13, whose fallback waits for the device."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupedExperts:
    """All in two products of torch's, for GPUs: where it has them, the host does not learn who got which rows."""

    gate_up: torch.Tensor  # [X, 2 * I, E] bfloat16
    down: torch.Tensor  # [X, E, I] bfloat16
    activate: Callable[[torch.Tensor], torch.Tensor]
    """`[M, 2 * I]` → `[M, I]`."""
    gate_up_bias: torch.Tensor | None = None  # [X, 2 * I]
    down_bias: torch.Tensor | None = None  # [X, E]

    @property
    def waits_for_device(self) -> bool:
        """On GPUs for which torch has no grouped product it reads on the host where each expert's rows end."""
        device = self.down.device
        return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] not in _GROUPED_CAPABILITIES

    def __call__(self, x: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """See `Experts`."""
        counts = torch.zeros(len(self.down), dtype=torch.int32, device=x.device)
        counts.scatter_add_(0, expert_ids, torch.ones_like(expert_ids, dtype=torch.int32))
        ends = counts.cumsum(0, dtype=torch.int32)
        gate_up = torch._grouped_mm(x, self.gate_up.transpose(1, 2), offs=ends)
        if self.gate_up_bias is not None:
            gate_up = gate_up + self.gate_up_bias[expert_ids]
        down = torch._grouped_mm(self.activate(gate_up), self.down.transpose(1, 2), offs=ends)
        return down if self.down_bias is None else down + self.down_bias[expert_ids]


def grouped_experts(
    weights: Sequence[Sequence[torch.Tensor]], activate: Callable[[torch.Tensor], torch.Tensor]
) -> GroupedExperts:
    """Groups the experts: gate `[I, E]`, up `[I, E]` and down `[E, I]` of each."""
    gate_up = torch.stack([torch.cat((gate, up)) for gate, up, _ in weights])
    return GroupedExperts(gate_up, torch.stack([down for _, _, down in weights]), activate)


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
        parts = computed[back].view(*ids.shape, x.shape[1]).float() * shares[..., None]  # [T, K, E]
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
