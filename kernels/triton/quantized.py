"""Linear maps of quantised weights: values are turned into the activations' dtype in registers, where all are exact.

    out[t, o] = sum over groups g of
                scale[o, g] * (sum over i in g of x[t, i] * value[o, i]) + offset[o, g] * (sum over i in g of x[t, i])

A program computes a tile of tokens and outputs, over all inputs or a share of them, which depends on the weight's sizes
and on the tile, never on other tokens. Sums are float32, rounded once, after the bias. Activations are not rounded:
`torch._scaled_mm`, the other way to multiply FP8, would take them in 8 bits. Long prompts multiply the weight
dequantised, each element of it rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.quantized import QuantForm, QuantizedWeight
from kernels.spec import Dims
from kernels.triton.variant import POINTERS, Variant, launch_options

_DEPTHS = (128, 64, 32, 16)
"""Inputs of one product of tiles: the largest that divides a group. INT4 halves it, so 16 is not for that."""
_WANTED_PROGRAMS = 1024
"""Of a product with few tokens: so many keep the memory busy."""
_MOST_SPLITS = 8
_LEAST_STEPS = 4
"""Tiles of inputs that a split has at least."""
_NUM_STAGES = 3
_WHOLE_WARPS = 4
"""Of kernels without a product."""
_ADDED = 1024
"""Elements that a program adds up over splits."""
_MULTIPLIED_PLAIN = 512
"""With more tokens than that, a weight is dequantised as a whole first: at 4,096, plain products take half the time.
The border is not measured."""
_DEQUANTIZED = 1024
"""Bytes of a row that a program dequantises."""
_VALUES = {QuantForm.INT8: "*i8", QuantForm.INT4: "*u8", QuantForm.FP8: "*u8"}
_CODES = {QuantForm.INT8: 0, QuantForm.INT4: 1, QuantForm.FP8: 2}
"""What the kernel calls a form."""


def can_keep(weight: QuantizedWeight) -> bool:
    """Whether the kernel takes the sizes of `weight`."""
    return weight.group % (32 if weight.form is QuantForm.INT4 else 16) == 0


class TokenTile(NamedTuple):
    """What a program computes of a step with up to so many tokens."""

    most_tokens: int
    block_tokens: int
    block_outputs: int
    deepest: int
    """Inputs at a time, at most."""
    num_warps: int
    shares_inputs: bool
    """Whether several programs may share the inputs of an output."""


_TILES = (
    TokenTile(16, 16, 64, 128, 2, shares_inputs=True),
    TokenTile(64, 32, 64, 128, 4, shares_inputs=True),
    TokenTile(_MULTIPLIED_PLAIN, 128, 128, 64, 8, shares_inputs=False),
)
"""Of 16 bits, the first two as a sweep on an H100 found them (bench/LOG.md); the third was measured at 4,096 only."""
_WIDE_TILES = (
    TokenTile(16, 16, 64, 16, 4, shares_inputs=True),
    TokenTile(_MULTIPLIED_PLAIN, 32, 64, 16, 4, shares_inputs=False),
)
"""Of float32, whose products need more registers. INT4 takes twice as many inputs."""


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
        if len(x) > _MULTIPLIED_PLAIN:
            return torch.nn.functional.linear(x, self._dequantized(), self.bias)
        sizes = _tile_for(len(x), x.dtype)
        tile = _constants(sizes, weight.form, weight.group, weight.num_inputs, x.dtype)
        num_splits, split_inputs = _splits(sizes, weight.num_outputs, weight.num_inputs, tile["DEPTH"])
        parts = out if num_splits == 1 else x.new_empty((num_splits, *out.shape), dtype=torch.float32)
        has_bias = self.bias is not None
        bias = out if self.bias is None else self.bias
        blocks = triton.cdiv(weight.num_outputs, sizes.block_outputs), triton.cdiv(len(x), sizes.block_tokens)
        _quantized_linear[(*blocks, num_splits)](
            *(x, self.values, scales, scales if self.offsets is None else self.offsets, bias, parts),
            *(len(x), weight.num_outputs, weight.num_inputs, x.stride(0), scales.shape[1], weight.group, split_inputs),
            **self._form(),
            HAS_BIAS=has_bias and num_splits == 1,
            **tile,
            **launch_options(sizes.num_warps, _NUM_STAGES),
        )
        if num_splits > 1:
            _add_splits[(triton.cdiv(out.numel(), _ADDED),)](
                *(parts, bias, out, num_splits, out.numel(), weight.num_outputs),
                HAS_BIAS=has_bias,
                BLOCK=_ADDED,
                **launch_options(_WHOLE_WARPS),
            )
        return out

    def _form(self) -> dict[str, int | bool]:
        """Compile-time arguments that say what a value means."""
        return {"FORM": _CODES[self.weight.form], "ZERO": self.zero, "HAS_OFFSETS": self.offsets is not None}

    def _dequantized(self) -> torch.Tensor:
        """The weight `[out, in]`, each element rounded once to the activations' dtype."""
        weight, scales = self.weight, self.weight.scales
        num_outputs, row_bytes = self.values.shape
        plain = torch.empty(num_outputs, weight.num_inputs, dtype=weight.dtype, device=self.values.device)
        _dequantize[(num_outputs, triton.cdiv(row_bytes, _DEQUANTIZED))](
            *(self.values, scales, scales if self.offsets is None else self.offsets, plain),
            *(row_bytes, scales.shape[1], weight.group),
            **self._form(),
            BLOCK=_DEQUANTIZED,
            **launch_options(_WHOLE_WARPS),
        )
        return plain


def _tile_for(num_tokens: int, dtype: torch.dtype) -> TokenTile:
    tiles = _WIDE_TILES if dtype is torch.float32 else _TILES
    return next(each for each in tiles if num_tokens <= each.most_tokens)


def _constants(
    sizes: TokenTile, form: QuantForm, group: int, num_inputs: int, dtype: torch.dtype
) -> dict[str, int | bool]:
    """Compile-time arguments that say how a product is cut."""
    deepest = 2 * sizes.deepest if form is QuantForm.INT4 and dtype is torch.float32 else sizes.deepest
    return {
        "ONE_GROUP": group == num_inputs,
        "BLOCK_TOKENS": sizes.block_tokens,
        "BLOCK_OUTPUTS": sizes.block_outputs,
        "DEPTH": next(depth for depth in _DEPTHS if depth <= deepest and group % depth == 0),
    }


def _splits(sizes: TokenTile, num_outputs: int, num_inputs: int, depth: int) -> tuple[int, int]:
    """How many programs share the inputs of a tile, and how many each has: by the weight's sizes and the tile alone."""
    if not sizes.shares_inputs:
        return 1, num_inputs
    wanted = _WANTED_PROGRAMS // triton.cdiv(num_outputs, sizes.block_outputs)
    num_steps = triton.cdiv(num_inputs, depth)
    steps = triton.cdiv(num_steps, max(1, min(wanted, _MOST_SPLITS, num_steps // _LEAST_STEPS)))
    return triton.cdiv(num_steps, steps), steps * depth


def compile_variants(arch: int) -> Iterator[Variant]:
    """Each form in each tile; alike on every `arch`."""
    for dtype in (torch.bfloat16, torch.float32):
        for form, group, zero, has_offsets in (
            (QuantForm.INT8, 4096, 0, False),
            (QuantForm.INT8, 16, 0, True),
            (QuantForm.INT4, 128, 0, True),
            (QuantForm.INT4, 32, 8, False),
            (QuantForm.FP8, 4096, 0, False),
            (QuantForm.FP8, 128, 0, False),
        ):
            flags = {"FORM": _CODES[form], "ZERO": zero, "HAS_OFFSETS": has_offsets}
            types = {**dict.fromkeys(("x", "bias", "out"), POINTERS[dtype]), "values": _VALUES[form]}
            label = f"{POINTERS[dtype][1:]} {form} by {group}"
            for sizes in _WIDE_TILES if dtype is torch.float32 else _TILES:
                constexprs = {**flags, **_constants(sizes, form, group, 4096, dtype)}
                name = f"{label} T={sizes.most_tokens}"
                for parts in dict.fromkeys((POINTERS[dtype], "*fp32" if sizes.shares_inputs else POINTERS[dtype])):
                    is_whole = parts == POINTERS[dtype]
                    yield _variant(
                        _quantized_linear,
                        {**types, "out": parts},
                        {**constexprs, "HAS_BIAS": is_whole},
                        sizes.num_warps,
                        name if is_whole else f"{name} shared",
                    )
            yield _variant(_dequantize, types, {**flags, "BLOCK": _DEQUANTIZED}, _WHOLE_WARPS, f"{label} plain")
        yield Variant(
            kernel=_add_splits,
            signature={"parts": "*fp32", **dict.fromkeys(("bias", "out"), POINTERS[dtype])},
            constexprs={"HAS_BIAS": True, "BLOCK": _ADDED},
            num_warps=_WHOLE_WARPS,
            label=f"quantized {POINTERS[dtype][1:]} add splits",
            aligned=frozenset(("num_outputs",)),
        )


def _variant(
    kernel: Any, types: Mapping[str, str], constexprs: Mapping[str, int | bool], num_warps: int, label: str
) -> Variant:
    return Variant(
        kernel=kernel,
        signature={**types, **dict.fromkeys(("scales", "offsets"), "*fp32")},
        constexprs=constexprs,
        num_warps=num_warps,
        num_stages=_NUM_STAGES if kernel is _quantized_linear else 1,
        label=f"quantized {label}",
        aligned=frozenset(("num_outputs", "num_inputs", "x_stride", "group", "split_inputs", "row_bytes")),
    )


@triton.jit
def _float8(codes):
    """float8_e4m3fn from its bits, by way of float16, whose exponent has one bit more: all but NaN, exactly."""
    bits = codes.to(tl.int16)
    moved = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return moved.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _multiplied(
    total, x_sums, x_at, value_at, start, has_output, has_token,
    FORM: tl.constexpr, ZERO: tl.constexpr, HAS_OFFSETS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Adds a tile's products, without scales, to `total` `[outputs, tokens]`, its inputs to `x_sums` `[tokens]`."""
    dtype: tl.constexpr = x_at.dtype.element_ty
    if FORM == 1:  # a byte holds two inputs: one product of the even ones, one of the odd ones
        codes = tl.load(value_at + start // 2, mask=has_output[:, None], other=0)
        rows_at = tl.trans(x_at) + start + tl.arange(0, 2 * WIDTH)[None, :]
        rows = tl.load(rows_at, mask=has_token[:, None], other=0.0)
        even, odd = tl.split(tl.reshape(rows, (rows.shape[0], WIDTH, 2)))
        even, odd = tl.trans(even), tl.trans(odd)
        low, high = (codes & 0x0F).to(tl.float32) - ZERO, (codes >> 4).to(tl.float32) - ZERO
        total = tl.dot(low.to(dtype), even, total, input_precision="ieee")
        total = tl.dot(high.to(dtype), odd, total, input_precision="ieee")
        if HAS_OFFSETS:
            x_sums += tl.sum(even.to(tl.float32), 0) + tl.sum(odd.to(tl.float32), 0)
    else:
        codes = tl.load(value_at + start, mask=has_output[:, None], other=0)
        rows = tl.load(x_at + start + tl.arange(0, WIDTH)[:, None], mask=has_token[None, :], other=0.0)
        wide = _float8(codes) if FORM == 2 else codes.to(tl.float32)
        total = tl.dot(wide.to(dtype), rows, total, input_precision="ieee")
        if HAS_OFFSETS:
            x_sums += tl.sum(rows.to(tl.float32), 0)
    return total, x_sums


@triton.jit
def _scaled(
    total, x_sums, scale_at, offset_at, has_output, HAS_OFFSETS: tl.constexpr
):  # fmt: skip
    """What a sum of products means, once its scale and offset are known."""
    total *= tl.load(scale_at, mask=has_output, other=0.0)[:, None]
    if HAS_OFFSETS:
        total += x_sums[None, :] * tl.load(offset_at, mask=has_output, other=0.0)[:, None]
    return total


@triton.jit(do_not_specialize=["num_tokens"])
def _quantized_linear(
    x, values, scales, offsets, bias, out,
    num_tokens, num_outputs, num_inputs, x_stride, num_groups, group, split_inputs,
    FORM: tl.constexpr, ZERO: tl.constexpr, HAS_OFFSETS: tl.constexpr, HAS_BIAS: tl.constexpr,
    ONE_GROUP: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Grid `[ceil(outputs / BLOCK_OUTPUTS), ceil(T / BLOCK_TOKENS), splits]`; writes `out` `[splits, T, outputs]`.

    The weight is the product's left side, which the matrix units read from registers.
    """
    outputs = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    tokens = tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    split = tl.program_id(2)
    has_output, has_token = outputs < num_outputs, tokens < num_tokens
    WIDTH: tl.constexpr = DEPTH // 2 if FORM == 1 else DEPTH  # bytes of a weight in one tile
    row_bytes = num_inputs // 2 if FORM == 1 else num_inputs
    value_at = values + outputs[:, None].to(tl.int64) * row_bytes + tl.arange(0, WIDTH)[None, :]
    x_at = x + tokens[None, :].to(tl.int64) * x_stride
    scale_at = scales + outputs.to(tl.int64) * num_groups
    offset_at = offsets + outputs.to(tl.int64) * num_groups
    nothing = tl.zeros((BLOCK_OUTPUTS, BLOCK_TOKENS), tl.float32)
    no_inputs = tl.zeros((BLOCK_TOKENS,), tl.float32)
    total, x_sums = nothing, no_inputs
    begin = split * split_inputs
    for start in range(begin, tl.minimum(begin + split_inputs, num_inputs), DEPTH):
        if ONE_GROUP:
            total, x_sums = _multiplied(
                total, x_sums, x_at, value_at, start, has_output, has_token, FORM, ZERO, HAS_OFFSETS, WIDTH
            )
        else:
            part, sums = _multiplied(
                nothing, no_inputs, x_at, value_at, start, has_output, has_token, FORM, ZERO, HAS_OFFSETS, WIDTH
            )
            group_at = start // group
            total += _scaled(part, sums, scale_at + group_at, offset_at + group_at, has_output, HAS_OFFSETS)
    if ONE_GROUP:
        total = _scaled(total, x_sums, scale_at, offset_at, has_output, HAS_OFFSETS)
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=has_output, other=0.0).to(tl.float32)[:, None]
    out_rows = split.to(tl.int64) * num_tokens + tokens
    out_at = out + out_rows[None, :] * num_outputs + outputs[:, None]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=has_token[None, :] & has_output[:, None])


@triton.jit(do_not_specialize=["num_splits", "num_elements"])
def _add_splits(parts, bias, out, num_splits, num_elements, num_outputs, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid `[ceil(T * outputs / BLOCK)]`: `parts` `[splits, T, outputs]` are added in their order, then rounded."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < num_elements
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(num_splits):
        total += tl.load(parts + tl.cast(split, tl.int64) * num_elements + at, mask=there, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + at % num_outputs, mask=there, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=there)


@triton.jit
def _dequantize(
    values, scales, offsets, out, row_bytes, num_groups, group,
    FORM: tl.constexpr, ZERO: tl.constexpr, HAS_OFFSETS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid `[outputs, ceil(row_bytes / BLOCK)]`: a piece of a row."""
    output = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    at = first + tl.arange(0, BLOCK)
    codes = tl.load(values + output * row_bytes + at, mask=at < row_bytes, other=0)
    if FORM == 1:
        wide = tl.interleave((codes & 0x0F).to(tl.float32) - ZERO, (codes >> 4).to(tl.float32) - ZERO)
        inputs = 2 * first + tl.arange(0, 2 * BLOCK)
        row_inputs = 2 * row_bytes
    else:
        wide = _float8(codes) if FORM == 2 else codes.to(tl.float32)
        inputs = at
        row_inputs = row_bytes
    there = inputs < row_inputs
    table_at = output * num_groups + inputs // group
    wide *= tl.load(scales + table_at, mask=there, other=0.0)
    if HAS_OFFSETS:
        wide += tl.load(offsets + table_at, mask=there, other=0.0)
    tl.store(out + output * row_inputs + inputs, wide.to(out.dtype.element_ty), mask=there)
