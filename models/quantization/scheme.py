"""What a quantised checkpoint says of one weight: its tensors, and how to make the weight from them.

The tensors of the file decide whether a module is quantised, so that lists of modules which were left as
they are need not be matched; config.json says how they are to be read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.quantized import QuantForm, QuantizedWeight, pack_int4, unpack_int4

Shape = tuple[int, ...]

FLOATS = frozenset(("F32", "BF16", "F16"))
"""Element types of plain tensors and of scales, by safetensors' names."""
INTS = frozenset(("I32", "I64"))
_INT8_ZERO = 128
"""The code that int8's 0 has."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of a tensor before the tensor is read."""

    shape: Shape
    dtype: str
    """The dtype's name in safetensors."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What a tensor must be."""

    shapes: tuple[Shape, ...]
    """Shapes that the tensor may have."""
    dtypes: frozenset[str] = FLOATS
    is_required: bool = True
    is_zero: bool = False
    """Whether the tensor may be present if all its values are zero."""


Weight = torch.Tensor | QuantizedWeight


class Scheme(Protocol):
    """How one method stores weights. A module's tensors are called by what follows its name and a dot."""

    def specs(self, shape: Shape, found: Mapping[str, Header]) -> dict[str, Spec] | None:
        """The tensors that stand for a weight `shape` = (out, in), given those found; None if it is plain.

        Of stacked experts (`Quantization.of_experts`) `shape` = (experts, in, out).
        """

    def decode(self, shape: Shape, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Weight:
        """The weight, for activations of `dtype`; plain where no `QuantizedWeight` can say what the tensors say.

        Of stacked experts as one `[experts * out, in]`.

        Raises ValueError saying what is wrong with their content.
        """


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of 4 or 8 bits from int32 `[rows, n]`, the lowest bits first → uint8 `[rows, n * 32 / bits]`."""
    codes = words.to(torch.int32).contiguous().view(torch.uint8)
    return unpack_int4(codes) if bits == 4 else codes


def affine(
    codes: torch.Tensor, bits: int, scales: torch.Tensor, zeros: torch.Tensor, group: int, dtype: torch.dtype
) -> QuantizedWeight:
    """`scale * (code - zero)` of codes `[out, in]` uint8; `scales`, `zeros` `[out, ceil(in / group)]`."""
    num_inputs = codes.shape[1]
    scales, zeros = scales.to(torch.float32), zeros.to(torch.float32)
    if bits == 4:
        offsets = cut_groups(-zeros * scales, group, num_inputs)
        return QuantizedWeight(QuantForm.INT4, pack_int4(codes), cut_groups(scales, group, num_inputs), offsets, dtype)
    centred = (zeros == _INT8_ZERO).all()
    return QuantizedWeight(
        QuantForm.INT8,
        (codes.to(torch.int16) - _INT8_ZERO).to(torch.int8),
        cut_groups(scales, group, num_inputs),
        None if centred else cut_groups((_INT8_ZERO - zeros) * scales, group, num_inputs),
        dtype,
    )


def cut_groups(table: torch.Tensor, group: int, num_inputs: int) -> torch.Tensor:
    """`table` `[out, ceil(in / group)]`, by groups that divide `in`: smaller ones if the last is not whole."""
    whole = math.gcd(group, num_inputs)
    if whole != group:
        table = table.repeat_interleave(group // whole, 1)[:, : num_inputs // whole]
    return table.contiguous()
