"""Stacked experts in MXFP4, as gpt-oss is published (OCP Microscaling Formats 1.0; shapes as in transformers 5.23).

    blocks   [experts, out, in / 32, 16]   uint8, two values of 4 bits (e2m1), the first in the low half
    scales   [experts, out, in / 32]       uint8, exponent of 2 with a bias of 127 (e8m0), of 32 inputs

They are held as they are, FP4 by 32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kernels.quantized import QuantForm, QuantizedWeight
from models.quantization.scheme import Header, Shape, Spec, Weight

_GROUP = 32
_BIAS = 127
_NO_NUMBER = 255
_BYTES = frozenset(("U8",))


class Mxfp4Scheme:
    """MXFP4 has no options."""

    def specs(self, shape: Shape, found: Mapping[str, Header]) -> dict[str, Spec] | None:
        """See `Scheme.specs`; `shape` = (experts, in, out)."""
        if not found.keys() & {"blocks", "scales"}:
            return None
        num_experts, num_inputs, num_outputs = shape
        groups = (num_experts, num_outputs, num_inputs // _GROUP)
        return {"blocks": Spec(((*groups, _GROUP // 2),), _BYTES), "scales": Spec((groups,), _BYTES)}

    def decode(self, shape: Shape, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Weight:
        """See `Scheme.decode`: `[experts * out, in]`."""
        num_experts, num_inputs, num_outputs = shape
        exponents = parts["scales"].flatten(0, 1)  # [experts * out, in / 32]
        if num_inputs % _GROUP:
            raise ValueError(f"{num_inputs} inputs do not divide into groups of {_GROUP}")
        if (exponents == _NO_NUMBER).any():
            raise ValueError(f"scales: {_NO_NUMBER} stands for no number")
        values = parts["blocks"].reshape(num_experts * num_outputs, -1).clone()  # it may lie in the mapped file
        scales = torch.ldexp(torch.ones(exponents.shape), exponents.int() - _BIAS)
        return QuantizedWeight(QuantForm.FP4, values, scales, None, dtype)
