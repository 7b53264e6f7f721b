"""Linear maps of quantised weights: values are turned into the activations' dtype in registers, where all are exact.

    out[t, o] = sum over groups g of
                scale[o, g] * (sum over i in g of x[t, i] * value[o, i]) + offset[o, g] * (sum over i in g of x[t, i])

A program computes a tile of tokens and outputs, inputs in one fixed order. Sums are float32, rounded once, after the
bias. Activations are not rounded: `torch._scaled_mm`, the other way to multiply FP8, would take them in 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.quantized import QuantForm, QuantizedWeight
from kernels.spec import Dims
from kernels.triton.variant import POINTERS, Variant, launch_options

_BLOCK_OUTPUTS = 64
_DEPTHS = (64, 32, 16)
"""Inputs of one product of tiles: the largest that divides a group. INT4 halves it, so 16 is not for that."""
_FEW_TOKENS, _MANY_TOKENS, _MANY_WIDE_TOKENS = 16, 64, 32
"""Tokens of a tile: in decode, in prefill, and there in float32, whose products need more registers."""
_WIDE_DEPTH = 32
"""The most inputs of a tile in float32."""
_NUM_STAGES = 3
_VALUES = {QuantForm.INT8: "*i8", QuantForm.INT4: "*u8", QuantForm.FP8: "*u8"}
_CODES = {QuantForm.INT8: 0, QuantForm.INT4: 1, QuantForm.FP8: 2}
"""What the kernel calls a form."""


def can_keep(weight: QuantizedWeight) -> bool:
    """Whether the kernel takes the sizes of `weight`."""
    return weight.group % (32 if weight.form is QuantForm.INT4 else 16) == 0


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedLinear:
    """A weight as it is, with its bias `[out]`; `can_keep` has said yes."""

    weight: QuantizedWeight
    bias: torch.Tensor | None
    offsets: torch.Tensor | None
    """None if there are none, or if `zero` says as much."""
    zero: int
    """What is taken from each value."""
    values: torch.Tensor
    """Those of FP8 as bytes: not every device that Triton compiles for has the type."""

    @classmethod
    def of(cls, weight: QuantizedWeight, bias: torch.Tensor | None) -> QuantizedLinear:
        """For a weight that `can_keep` takes."""
        values = weight.values.view(torch.uint8) if weight.form is QuantForm.FP8 else weight.values
        zero = 8 if weight.form is QuantForm.INT4 and weight.is_symmetric else 0
        return cls(weight, bias, None if zero else weight.offsets, zero, values)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X `[T, in]`, any stride over T → `[T, out]`."""
        weight, scales = self.weight, self.weight.scales
        Dims(**{"in": weight.num_inputs}).check("x", x, ("T", "in"), weight.dtype, self.values.device)
        out = torch.empty(len(x), weight.num_outputs, dtype=x.dtype, device=x.device)
        if not out.numel():
            return out
        tile = _tile(weight.form, weight.group, len(x), x.dtype)
        grid = triton.cdiv(weight.num_outputs, _BLOCK_OUTPUTS), triton.cdiv(len(x), tile["BLOCK_TOKENS"])
        _quantized_linear[grid](
            *(x, self.values, scales, scales if self.offsets is None else self.offsets),
            *(out if self.bias is None else self.bias, out),
            *(len(x), weight.num_outputs, weight.num_inputs, x.stride(0), scales.shape[1], weight.group),
            FORM=_CODES[weight.form],
            ZERO=self.zero,
            HAS_OFFSETS=self.offsets is not None,
            HAS_BIAS=self.bias is not None,
            **tile,
            **launch_options(_num_warps(tile), _NUM_STAGES),
        )
        return out


def _tile(form: QuantForm, group: int, num_tokens: int, dtype: torch.dtype) -> dict[str, int]:
    """Sizes of a tile, as compile-time arguments."""
    is_wide = dtype is torch.float32
    deepest = (_WIDE_DEPTH if form is QuantForm.INT4 else _WIDE_DEPTH // 2) if is_wide else _DEPTHS[0]
    many = _MANY_WIDE_TOKENS if is_wide else _MANY_TOKENS
    return {
        "BLOCK_TOKENS": _FEW_TOKENS if num_tokens <= _FEW_TOKENS else many,
        "BLOCK_OUTPUTS": _BLOCK_OUTPUTS,
        "DEPTH": next(depth for depth in _DEPTHS if depth <= deepest and group % depth == 0),
    }


def _num_warps(tile: Mapping[str, int]) -> int:
    return 4 if tile["BLOCK_TOKENS"] == _FEW_TOKENS else 8


def compile_variants(arch: int) -> Iterator[Variant]:
    """Each form for decode and for prefill; alike on every `arch`."""
    for dtype in (torch.bfloat16, torch.float32):
        for form, group, zero, has_offsets in (
            (QuantForm.INT8, 4096, 0, False),
            (QuantForm.INT8, 16, 0, True),
            (QuantForm.INT4, 128, 0, True),
            (QuantForm.INT4, 32, 8, False),
            (QuantForm.FP8, 128, 0, False),
        ):
            for num_tokens in (1, 512):
                tile = _tile(form, group, num_tokens, dtype)
                flags = {"FORM": _CODES[form], "ZERO": zero, "HAS_OFFSETS": has_offsets, "HAS_BIAS": True}
                yield Variant(
                    kernel=_quantized_linear,
                    signature={
                        **dict.fromkeys(("x", "bias", "out"), POINTERS[dtype]),
                        **dict.fromkeys(("scales", "offsets"), "*fp32"),
                        "values": _VALUES[form],
                    },
                    constexprs={**flags, **tile},
                    num_warps=_num_warps(tile),
                    num_stages=_NUM_STAGES,
                    label=f"quantized {POINTERS[dtype][1:]} {form} by {group} T={num_tokens}",
                    aligned=frozenset(("num_outputs", "num_inputs", "x_stride", "group")),
                )


@triton.jit
def _float8(codes):
    """float8_e4m3fn from its bits, by way of float16, whose exponent has one bit more: all but NaN, exactly."""
    bits = codes.to(tl.int16)
    moved = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return moved.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit(do_not_specialize=["num_tokens"])
def _quantized_linear(
    x, values, scales, offsets, bias, out,
    num_tokens, num_outputs, num_inputs, x_stride, num_groups, group,
    FORM: tl.constexpr, ZERO: tl.constexpr, HAS_OFFSETS: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    outputs = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    tokens = tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    has_output, has_token = outputs < num_outputs, tokens < num_tokens
    dtype: tl.constexpr = x.dtype.element_ty
    WIDTH: tl.constexpr = DEPTH // 2 if FORM == 1 else DEPTH  # bytes of a weight in one tile
    places = tl.arange(0, WIDTH)
    row_bytes = num_inputs // 2 if FORM == 1 else num_inputs
    value_at = values + outputs[None, :].to(tl.int64) * row_bytes + places[:, None]  # [WIDTH, outputs]
    x_at = x + tokens[:, None].to(tl.int64) * x_stride
    table_at = outputs.to(tl.int64) * num_groups
    total = tl.zeros((BLOCK_TOKENS, BLOCK_OUTPUTS), tl.float32)
    for start in range(0, num_inputs, DEPTH):
        scale = tl.load(scales + table_at + start // group, mask=has_output, other=0.0)
        if FORM == 1:  # a byte holds two inputs: one product of the even ones, one of the odd ones
            codes = tl.load(value_at + start // 2, mask=has_output[None, :], other=0)
            even = tl.load(x_at + start + 2 * places[None, :], mask=has_token[:, None], other=0.0)
            odd = tl.load(x_at + start + 2 * places[None, :] + 1, mask=has_token[:, None], other=0.0)
            low, high = (codes & 0x0F).to(tl.float32) - ZERO, (codes >> 4).to(tl.float32) - ZERO
            part = tl.dot(even, low.to(dtype), input_precision="ieee")
            part = tl.dot(odd, high.to(dtype), part, input_precision="ieee")
            if HAS_OFFSETS:
                sums = tl.sum(even.to(tl.float32), 1) + tl.sum(odd.to(tl.float32), 1)
        else:
            codes = tl.load(value_at + start, mask=has_output[None, :], other=0)
            rows = tl.load(x_at + start + places[None, :], mask=has_token[:, None], other=0.0)
            if FORM == 2:
                part = tl.dot(rows, _float8(codes).to(dtype), input_precision="ieee")
            else:
                part = tl.dot(rows, codes.to(tl.float32).to(dtype), input_precision="ieee")
            if HAS_OFFSETS:
                sums = tl.sum(rows.to(tl.float32), 1)
        total += part * scale[None, :]
        if HAS_OFFSETS:
            offset = tl.load(offsets + table_at + start // group, mask=has_output, other=0.0)
            total += sums[:, None] * offset[None, :]
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=has_output, other=0.0).to(tl.float32)[None, :]
    out_at = out + tokens[:, None].to(tl.int64) * num_outputs + outputs[None, :]
    tl.store(out_at, total.to(dtype), mask=has_token[:, None] & has_output[None, :])
