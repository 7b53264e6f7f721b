"""NVFP4: values of 4 bits (e2m1), a scale (e4m3) of 16 inputs and one of the whole weight.

    weight_packed, weight                  [out, in / 2]    uint8, the first value in the low half
    weight_scale                           [out, in / 16]   float8_e4m3fn
    weight_global_scale, weight_scale_2    one              what compressed-tensors divides scales by, what ModelOpt
                                                            multiplies them with

Activations may be meant to be 4 bits too; they are multiplied as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels.quantized import QuantForm, QuantizedWeight
from models.quantization.scheme import FLOATS, Header, Shape, Spec, Weight

_GROUP = 16
_UNUSED = ("input_scale", "input_global_scale")


@dataclass(frozen=True, slots=True)
class Nvfp4Scheme:
    """Names of the tensors of an NVFP4 weight, by their author."""

    values: str
    whole: str
    """What the scale of the whole weight is called."""
    divides: bool

    def specs(self, shape: Shape, found: Mapping[str, Header]) -> dict[str, Spec] | None:
        """See `Scheme.specs`."""
        if self.whole not in found:
            return None
        num_outputs, num_inputs = shape
        one = ((), (1,))
        specs = {name: Spec(one, is_required=False) for name in _UNUSED}
        return specs | {
            self.values: Spec(((num_outputs, num_inputs // 2),), frozenset(("U8",))),
            "weight_scale": Spec(((num_outputs, num_inputs // _GROUP),), frozenset(("F8_E4M3",))),
            self.whole: Spec(one, FLOATS),
        }

    def decode(self, shape: Shape, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Weight:
        """See `Scheme.decode`."""
        if shape[1] % _GROUP:
            raise ValueError(f"{shape[1]} inputs do not divide into groups of {_GROUP}")
        whole = parts[self.whole].float().reshape(1, 1)
        scales = parts["weight_scale"].float() * (1 / whole if self.divides else whole)
        values = parts[self.values].clone()  # it may lie in the mapped file
        return QuantizedWeight(QuantForm.FP4, values, scales, None, dtype)
