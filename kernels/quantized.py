"""Weights in 8 and 4 bits: what they mean, and how plain ones are rounded to them.

Every form is the same sum: `w[o, i] = scale[o, i / group] * value[o, i] + offset[o, i / group]`. Knows no file format
(`models`) and no processor (the sets of kernels read or repack what lies here).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from tandem.errors import InternalError

INT4_GROUP = 32
"""Inputs per scale of INT4 weights that are made here. A group's error follows its largest weight, so small groups
are exact and large ones small; this is the smallest that published forms have, and it divides every usual size."""
_INT4_ZERO = 8
_INT4_SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Steps that are tried for a group, as parts of the one that reaches its largest weight: to clip that one may pay."""
_INT8_MAX = 127
_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the magnitudes of FP4 by their code; the code's highest bit is the sign."""
_E2M1_EXPONENT = 2
"""Exponent of the largest magnitude, 6."""
_ROUNDED_AT_ONCE = 1 << 20
"""Elements."""


class QuantForm(StrEnum):
    """How a value is stored."""

    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"
    FP4 = "fp4"
    """e2m1: what MXFP4 and NVFP4 have, which differ in their groups and in what their scales may be."""


_VALUE_DTYPES = {
    QuantForm.INT8: torch.int8,
    QuantForm.INT4: torch.uint8,
    QuantForm.FP8: torch.float8_e4m3fn,
    QuantForm.FP4: torch.uint8,
}
HALF_BYTES = frozenset((QuantForm.INT4, QuantForm.FP4))
"""Forms of which two values share a byte."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight `[out, in]` in `form`. Raises InternalError if its tensors do not fit one another."""

    form: QuantForm
    values: torch.Tensor
    """`[out, in]` int8 or float8_e4m3fn; INT4, FP4: `[out, in / 2]` uint8, two of 4 bits, the first in the low half."""
    scales: torch.Tensor
    """`[out, in / group]` float32."""
    offsets: torch.Tensor | None
    """What is added, shaped like `scales`; None adds nothing. Symmetric INT4 has `-8 * scales`."""
    dtype: torch.dtype
    """What it stands for: that of the activations which it is multiplied with."""

    def __post_init__(self) -> None:
        tables = {"scales": self.scales} | ({} if self.offsets is None else {"offsets": self.offsets})
        if self.values.dim() != 2 or self.values.dtype is not _VALUE_DTYPES[self.form]:
            raise InternalError(f"values: {list(self.values.shape)} {self.values.dtype} are not those of {self.form}")
        for name, table in tables.items():
            if table.dtype is not torch.float32 or table.shape != self.scales.shape or len(table) != len(self.values):
                raise InternalError(f"{name}: {list(table.shape)} {table.dtype} do not fit {len(self.values)} outputs")
        if self.scales.dim() != 2 or self.num_inputs % self.scales.shape[1]:
            raise InternalError(f"scales: {list(self.scales.shape)} do not divide {self.num_inputs} inputs into groups")

    @property
    def num_outputs(self) -> int:
        """Rows."""
        return len(self.values)

    @property
    def num_inputs(self) -> int:
        """Values of a row."""
        return self.values.shape[1] * (2 if self.form in HALF_BYTES else 1)

    @property
    def group(self) -> int:
        """Inputs that share a scale; `num_inputs` if each output has a single scale."""
        return self.num_inputs // self.scales.shape[1]

    @property
    def is_symmetric(self) -> bool:
        """Whether a value and its opposite are alike: no offsets, or for INT4 `-8 * scales`."""
        if self.form is not QuantForm.INT4:
            return self.offsets is None
        return self.offsets is not None and torch.equal(self.offsets, -_INT4_ZERO * self.scales)

    def to(self, device: torch.device) -> QuantizedWeight:
        """The same weight on `device`."""
        offsets = None if self.offsets is None else self.offsets.to(device)
        return replace(self, values=self.values.to(device), scales=self.scales.to(device), offsets=offsets)

    def rows(self, index: torch.Tensor | slice) -> QuantizedWeight:
        """The outputs `index` `[n]`, in its order; of a slice views."""
        offsets = None if self.offsets is None else self.offsets[index]
        return replace(self, values=self.values[index], scales=self.scales[index], offsets=offsets)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The weight `[out, in]` in `dtype` (None: its own); rounded once, from float32 or, for it, in float64."""
        dtype = dtype or self.dtype
        if self.form is QuantForm.FP4:
            return self.as_int8().dequantize(dtype)
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        values = unpack_int4(self.values) if self.form is QuantForm.INT4 else self.values
        grouped = values.to(wide).view(self.num_outputs, -1, self.group)  # [out, in / group, group]
        grouped.mul_(self.scales[:, :, None])
        if self.offsets is not None:
            grouped.add_(self.offsets[:, :, None])
        return grouped.view(self.num_outputs, -1).to(dtype)

    def as_int8(self) -> QuantizedWeight:
        """The same weight, to the bit, of a form of integers or FP4, with a byte per value."""
        if self.form is QuantForm.INT4:
            return replace(self, form=QuantForm.INT8, values=unpack_int4(self.values).to(torch.int8))
        if self.form is QuantForm.FP4:
            doubled = torch.tensor((*_E2M1_DOUBLED, *(-value for value in _E2M1_DOUBLED)), dtype=torch.int8)
            codes = torch.arange(256)
            pairs = torch.stack((doubled[codes & 15], doubled[codes >> 4]), dim=1).view(torch.int16).flatten()  # [256]
            values = pairs.to(self.values.device).index_select(0, self.values.flatten().int())
            whole = values.view(torch.int8).view(self.num_outputs, self.num_inputs)
            return replace(self, form=QuantForm.INT8, values=whole, scales=self.scales / 2)
        return self


def dequantized(weight: torch.Tensor | QuantizedWeight) -> torch.Tensor:
    """A plain weight as it is, a quantised one in the dtype that it stands for."""
    return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight


def quantize(weight: torch.Tensor, form: QuantForm) -> QuantizedWeight:
    """Rounds `weight` `[out, in]` to the nearest value: one scale per output, INT4 one per `INT4_GROUP` inputs.

    INT4 takes the largest of its divisors that `in` has, FP4 too, whose scales are powers of 2. All forms are
    symmetric: least and greatest of a group would err a twentieth less in INT4, but cost a second table that is read
    with each product. Some rows at a time, so that what is needed meanwhile is small.
    """
    rows = max(1, _ROUNDED_AT_ONCE // weight.shape[1])
    whole = stack([_quantize_rows(some, form) for some in torch.split(weight, rows)])
    assert whole is not None  # all of one form
    return whole


def _quantize_rows(weight: torch.Tensor, form: QuantForm) -> QuantizedWeight:
    wide = weight.to(torch.float32)
    if form is QuantForm.INT4:
        return _quantize_int4(wide, weight.dtype)
    if form is QuantForm.FP4:
        return _quantize_fp4(wide, weight.dtype)
    largest = wide.abs().amax(1, keepdim=True)  # [out, 1]
    largest.masked_fill_(largest == 0, 1.0)
    if form is QuantForm.INT8:
        scales = largest / _INT8_MAX
        return QuantizedWeight(form, (wide / scales).round_().to(torch.int8), scales, None, weight.dtype)
    bound = torch.finfo(torch.float8_e4m3fn).max
    scales = largest / bound
    values = (wide / scales).clamp_(-bound, bound).to(torch.float8_e4m3fn)
    return QuantizedWeight(form, values, scales, None, weight.dtype)


def _quantize_int4(wide: torch.Tensor, dtype: torch.dtype) -> QuantizedWeight:
    """The weight that is largest in magnitude becomes -8: the one value whose opposite there is none of.

    Scales are rounded to bfloat16 before values are chosen, so that kernels may hold them in two bytes.
    """
    group = math.gcd(INT4_GROUP, wide.shape[1])
    grouped = wide.reshape(len(wide), -1, group)  # [out, in / group, group]
    largest = grouped.gather(2, grouped.abs().argmax(2, keepdim=True))  # [out, in / group, 1], signed
    largest.masked_fill_(largest == 0, -float(_INT4_ZERO))
    best_error = torch.full_like(largest, torch.inf)
    scales, values = torch.empty_like(largest), torch.empty_like(grouped)
    for shrink in _INT4_SHRINK:
        tried = (largest * (-shrink / _INT4_ZERO)).to(torch.bfloat16).to(torch.float32)
        rounded = (grouped / tried).round_().clamp_(-_INT4_ZERO, _INT4_ZERO - 1)
        error = (rounded * tried - grouped).pow_(2).sum(2, keepdim=True)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        scales = torch.where(better, tried, scales)
        values = torch.where(better, rounded, values)
    packed = pack_int4((values + _INT4_ZERO).to(torch.uint8).view(len(wide), -1))
    scales = scales.squeeze(2)
    return QuantizedWeight(QuantForm.INT4, packed, scales, -_INT4_ZERO * scales, dtype)


def _quantize_fp4(wide: torch.Tensor, dtype: torch.dtype) -> QuantizedWeight:
    """As MXFP4: a group's largest weight has the largest exponent that there is."""
    grouped = wide.reshape(len(wide), -1, math.gcd(INT4_GROUP, wide.shape[1]))  # [out, in / group, group]
    largest = grouped.abs().amax(2)
    largest.masked_fill_(largest == 0, 1.0)
    scales = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1 - _E2M1_EXPONENT)
    doubled = torch.tensor(_E2M1_DOUBLED, dtype=torch.float32, device=wide.device)
    codes = torch.bucketize((grouped / scales[:, :, None]).abs_(), (doubled[1:] + doubled[:-1]) / 4)
    codes += 8 * grouped.signbit()
    return QuantizedWeight(QuantForm.FP4, pack_int4(codes.to(torch.uint8).view(len(wide), -1)), scales, None, dtype)


def zero_weight(form: QuantForm, shape: tuple[int, int], group: int, dtype: torch.dtype) -> QuantizedWeight:
    """A weight of zeros, `shape` = (out, in): what kernels are asked about that are to say which weights they take."""
    num_outputs, num_inputs = shape
    whole = quantize(torch.zeros(num_outputs, group, dtype=dtype), form)
    parts = num_inputs // group
    offsets = None if whole.offsets is None else -_INT4_ZERO * torch.ones(num_outputs, parts)
    return replace(whole, values=whole.values.repeat(1, parts), scales=torch.ones(num_outputs, parts), offsets=offsets)


def stack(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Weights of equal inputs as one, by rows, such as q, k and v; no value changes.

    Where they differ, groups are cut to what all share, and 4 bits become INT8. None where FP8 meets integers.
    """
    forms = {weight.form for weight in weights}
    if QuantForm.FP8 in forms and len(forms) > 1:
        return None
    form = forms.pop() if len(forms) == 1 else QuantForm.INT8
    group = math.gcd(*(weight.group for weight in weights))
    weights = [weight if weight.form is form else weight.as_int8() for weight in weights]
    values = [weight.values for weight in weights]
    scales = torch.cat([weight.scales.repeat_interleave(weight.group // group, 1) for weight in weights])
    offsets = None
    if any(weight.offsets is not None for weight in weights):
        offsets = torch.cat(
            [
                (torch.zeros_like(weight.scales) if weight.offsets is None else weight.offsets).repeat_interleave(
                    weight.group // group, 1
                )
                for weight in weights
            ]
        )
    return QuantizedWeight(form, torch.cat(values), scales, offsets, weights[0].dtype)


def pack_int4(values: torch.Tensor) -> torch.Tensor:
    """Values 0 to 15 `[out, in]` uint8 → `[out, in / 2]`; `in` must be even."""
    return values[:, 0::2] | (values[:, 1::2] << 4)


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """The opposite of `pack_int4`."""
    return torch.stack((packed & 0x0F, packed >> 4), dim=2).flatten(1)  # [out, in / 2, 2] → [out, in]
