"""Experts that a checkpoint holds as one tensor per projection, and what becomes of them (`ExpertNames.stacked`).

Inputs come first in plain ones; gates and ups take turns among the outputs, and are put after one another here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.gate_products import GateProduct, gate_product
from kernels.operations import Operations
from kernels.quantized import QuantizedWeight
from models.config import ExpertConfig
from models.experts import GroupedExperts
from models.layers import GatedMlp

Weight = torch.Tensor | QuantizedWeight


@dataclass(frozen=True, slots=True, eq=False)
class StackedExperts:
    """Weights `[X, in, out]`, or quantised `[X * out, in]`; biases `[X, out]`."""

    gate_up: Weight
    gate_up_bias: torch.Tensor
    down: Weight
    down_bias: torch.Tensor
    config: ExpertConfig

    def grouped(self, silu_mul: GateProduct) -> GroupedExperts | None:
        """For GPUs; None of quantised ones."""
        if isinstance(self.gate_up, QuantizedWeight) or isinstance(self.down, QuantizedWeight):
            return None
        order = self._gates_then_ups()
        weights = self.gate_up.mT[:, order].contiguous(), self.down.mT.contiguous()  # [X, out, in] each
        return GroupedExperts(
            *weights, gate_product(self.config.gate, silu_mul), self.gate_up_bias[:, order].contiguous(), self.down_bias
        )

    def separate(self, operations: Operations, form_of: Callable[[Weight], Weight]) -> tuple[GatedMlp, ...]:
        """`form_of`: from a weight `[out, in]` to the form that it is held in."""
        order = self._gates_then_ups()
        rows = torch.arange(self.down_bias.shape[1], device=order.device)
        experts = []
        for expert in range(self.config.num_experts):
            into, out = form_of(_of_expert(self.gate_up, expert, order)), form_of(_of_expert(self.down, expert, rows))
            gate_up = operations.gated_linear(into, self.gate_up_bias[expert, order], self.config.gate)
            down = operations.linear(out, self.down_bias[expert])
            experts.append(GatedMlp(gate_up, down, self.config.intermediate_size))
        return tuple(experts)

    def _gates_then_ups(self) -> torch.Tensor:
        outputs = torch.arange(2 * self.config.intermediate_size, device=self.gate_up_bias.device)
        return torch.cat((outputs[0::2], outputs[1::2]))


def _of_expert(stacked: Weight, expert: int, outputs: torch.Tensor) -> Weight:
    """The weight `[out, in]` of one expert, with `outputs` in their order."""
    if isinstance(stacked, QuantizedWeight):
        return stacked.rows(expert * len(outputs) + outputs)
    return stacked[expert].t()[outputs].contiguous()
