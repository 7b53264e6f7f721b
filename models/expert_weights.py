"""Weights of a layer's experts, one below the other, and what becomes of them: one grouped map, or a map per expert.

A checkpoint has a tensor per projection of each expert, or one for all of them (`ExpertNames.stacked`): inputs come
first in plain ones of these; gates and ups take turns among the outputs, and are put after one another here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.gate_products import gate_product
from kernels.operations import LinearMap, Operations
from kernels.quantized import QuantizedWeight
from models.config import ExpertConfig
from models.experts import GroupedExperts
from models.layers import GatedMlp
from models.shard import Shard, gate_up_rows, rows_of

Weight = torch.Tensor | QuantizedWeight


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """Gates, ups and downs of X experts."""

    gate_up: Weight
    """`[X * 2 * I, E]`, gates of an expert before its ups."""
    down: Weight
    """`[X * E, I]`."""
    config: ExpertConfig
    gate_up_bias: torch.Tensor | None = None  # [X, 2 * I]
    down_bias: torch.Tensor | None = None  # [X, E]

    @classmethod
    def of_stacked(
        cls,
        gate_up: tuple[Weight, torch.Tensor],
        down: tuple[Weight, torch.Tensor],
        config: ExpertConfig,
        form_of: Callable[[Weight], Weight],
    ) -> ExpertWeights:
        """Takes a checkpoint's weights `[X, in, out]`, or quantised `[X * out, in]`, each with its bias `[X, out]`.

        `form_of`: from a weight to the form that it is held in.
        """
        outputs = torch.arange(2 * config.intermediate_size, device=down[1].device)
        order = torch.cat((outputs[0::2], outputs[1::2]))
        rows = (torch.arange(config.num_experts, device=order.device)[:, None] * len(order) + order).flatten()
        into, out = _by_rows(gate_up[0]), _by_rows(down[0])
        into = into.rows(rows) if isinstance(into, QuantizedWeight) else into[rows]
        return cls(form_of(into), form_of(out), config, gate_up[1][:, order].contiguous(), down[1])

    def grouped(self, operations: Operations) -> GroupedExperts | None:
        """One map for gates and ups and one for downs, or None where `operations` do not group such weights."""
        num_experts = self.config.num_experts
        gate_up = operations.grouped_linear(self.gate_up, self.gate_up_bias, num_experts)
        down = operations.grouped_linear(self.down, self.down_bias, num_experts)
        if gate_up is None or down is None:
            return None
        return GroupedExperts(gate_up, down, gate_product(self.config.gate, operations.silu_mul), num_experts)

    def separate(self, operations: Operations, shard: Shard | None = None) -> tuple[GatedMlp, ...]:
        """Makes the maps of each expert, whole or the part of `shard`, whose sums stay apart by segment."""
        config, experts = self.config, []
        for expert in range(config.num_experts):
            into, out = (_of_expert(weight, expert, config.num_experts) for weight in (self.gate_up, self.down))
            offset, last = (None if each is None else each[expert] for each in (self.gate_up_bias, self.down_bias))
            if shard is None:
                down: LinearMap = operations.linear(out, last)
            else:
                borders = shard.borders(out, "an expert's way back")
                down = shard.segmented(operations, out, last, borders)
                rows = gate_up_rows(range(borders[0], borders[-1]), config.intermediate_size, 1)[0]
                into, offset = rows_of(into, rows), None if offset is None else offset[rows]
            experts.append(GatedMlp(operations.gated_linear(into, offset, config.gate), down, config.intermediate_size))
        return tuple(experts)


def _by_rows(stacked: Weight) -> Weight:
    return stacked if isinstance(stacked, QuantizedWeight) else stacked.mT.flatten(0, 1)


def _of_expert(weight: Weight, expert: int, num_experts: int) -> Weight:
    """The weight `[out, in]` of this expert."""
    if isinstance(weight, torch.Tensor):
        return weight.chunk(num_experts)[expert]
    num_outputs = weight.num_outputs // num_experts
    return weight.rows(slice(expert * num_outputs, (expert + 1) * num_outputs))
