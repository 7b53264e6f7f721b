"""FP8 by FP8: activations of long prompts are rounded too, a scale per token, and torch multiplies both in 8 bits.

A token's result depends on no other token, but errs by the rounding: 2 to 3 % of the size of its terms. Shorter steps
are bound by the memory of the weight, and multiply activations as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.quantized import QuantForm, QuantizedWeight
from kernels.triton.quantized import MULTIPLIED_PLAIN, QuantizedLinear

FP8_ARCH = 89
"""Least compute capability that multiplies FP8."""
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_LEAST_STEP = torch.finfo(torch.float32).tiny
_MULTIPLE = 16
"""Inputs and outputs that `torch._scaled_mm` takes."""


def can_round(weight: QuantizedWeight) -> bool:
    """Whether torch multiplies `weight` by rounded activations: FP8 with a scale per output, beside bfloat16."""
    return (
        weight.form is QuantForm.FP8
        and weight.dtype is torch.bfloat16
        and weight.group == weight.num_inputs
        and weight.offsets is None
        and weight.num_inputs % _MULTIPLE == weight.num_outputs % _MULTIPLE == 0
    )


@dataclass(frozen=True, slots=True, eq=False)
class RoundingLinear:
    """A weight that `can_round` takes."""

    linear: QuantizedLinear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X `[T, in]` → `[T, out]`."""
        if len(x) <= MULTIPLIED_PLAIN:
            return self.linear(x)
        weight = self.linear.weight
        weight.check(x)
        wide = x.float()
        steps = (wide.abs().amax(1, keepdim=True) / _LARGEST).clamp_(min=_LEAST_STEP)  # [T, 1]
        return torch._scaled_mm(
            (wide / steps).to(torch.float8_e4m3fn),
            weight.values.view(torch.float8_e4m3fn).t(),
            scale_a=steps,
            scale_b=weight.scales.t(),  # [1, out]
            bias=self.linear.bias,
            out_dtype=x.dtype,
        )
