"""Stacked experts in MXFP4, as gpt-oss is published (OCP Microscaling Formats 1.0; shapes as in transformers 5.23).

    blocks   [experts, out, in / 32, 16]   uint8, two values of 4 bits (e2m1), the first in the low half
    scales   [experts, out, in / 32]       uint8, exponent of 2 with a bias of 127 (e8m0), of 32 inputs

Twice a value is an integer of at most 12, so that INT8 with a scale for 32 inputs says the same, to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kernels.quantized import QuantForm, QuantizedWeight
from models.quantization.scheme import Header, Shape, Spec, Weight

_GROUP = 32
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the magnitudes of e2m1; the highest bit is the sign."""
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
        """See `Scheme.decode`: `[experts * out, in]`. One expert after the other, so that little is needed besides."""
        num_experts, num_inputs, num_outputs = shape
        exponents = parts["scales"].flatten(0, 1)  # [experts * out, in / 32]
        if num_inputs % _GROUP:
            raise ValueError(f"{num_inputs} inputs do not divide into groups of {_GROUP}")
        if (exponents == _NO_NUMBER).any():
            raise ValueError(f"scales: {_NO_NUMBER} stands for no number")
        pairs = _pairs_of_bytes()
        values = torch.empty(num_experts, num_outputs * num_inputs // 2, dtype=torch.int16)
        for expert, blocks in zip(values, parts["blocks"], strict=True):
            torch.index_select(pairs, 0, blocks.flatten().int(), out=expert)
        return QuantizedWeight(
            QuantForm.INT8,
            values.view(torch.int8).view(num_experts * num_outputs, num_inputs),
            torch.ldexp(torch.full(exponents.shape, 0.5), exponents.int() - _BIAS),
            None,
            dtype,
        )


def _pairs_of_bytes() -> torch.Tensor:
    """Both doubled values of each byte `[256]`, as the int16 that lies in memory as the first and the second."""
    values = torch.tensor((*_DOUBLED, *(-value for value in _DOUBLED)), dtype=torch.int8)
    codes = torch.arange(256)
    return torch.stack((values[codes & 15], values[codes >> 4]), dim=1).view(torch.int16).flatten()
