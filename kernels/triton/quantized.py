"""Linear maps of quantised weights: values are turned into the activations' dtype in registers, where all are exact.

    out[t, o] = sum over groups g of
                scale[o, g] * (sum over i in g of x[t, i] * value[o, i]) + offset[o, g] * (sum over i in g of x[t, i])

A program computes a tile of tokens and outputs, over all inputs or a share of them, which depends on the weight's sizes
and on the tile, never on other tokens. Sums are float32, rounded once, after the bias. Activations are not rounded:
`torch._scaled_mm`, the other way to multiply FP8, would take them in 8 bits. Long prompts multiply the weight
dequantised, each element of it rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.quantized import QuantForm, QuantizedWeight, unpack_int4
from kernels.spec import Dims
from kernels.triton.narrow import from_float8, from_int4, from_int8
from kernels.triton.variant import POINTERS, Variant, launch_options

_WIDTHS = (128, 64, 32, 16)
"""Bytes of a row in a tile, and inputs of one product; INT4 has two."""
_MOST_SPLITS = 8
_LEAST_STEPS = 4
"""Tiles of inputs that a split has at least."""
_WHOLE_WARPS = 4
"""Of kernels without a product."""
_SUMMED = 128
"""Inputs that a program adds up at a time."""
_ADDED = 1024
"""Elements that a program adds up over splits."""
_MULTIPLIED_PLAIN = 256
"""With more tokens than that, a weight is dequantised as a whole first: on an H200 both take as long at 256
(bench/LOG.md)."""
_DEQUANTIZED = 1024
"""Bytes of a row that a program dequantises."""
_PAIRED_AT_ONCE = 1 << 24
"""Bytes."""
_VALUES = {QuantForm.INT8: "*i8", QuantForm.INT4: "*u8", QuantForm.FP8: "*i8"}
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
    width: int
    """Bytes of a row at a time, at most."""
    num_warps: int
    num_stages: int
    wanted_programs: int
    """Where outputs are too few for so many, several programs share the inputs of each."""


_TILES = (
    TokenTile(8, 8, 64, 128, 4, 4, 512),
    TokenTile(16, 16, 64, 128, 2, 3, 512),
    TokenTile(32, 32, 64, 128, 2, 3, 512),
    TokenTile(64, 64, 64, 128, 4, 3, 256),
    TokenTile(_MULTIPLIED_PLAIN, 128, 64, 64, 4, 3, 256),
)
"""Of 16 bits, as a sweep on an H200 found them (bench/LOG.md)."""
_WIDE_TILES = (
    TokenTile(16, 16, 64, 16, 4, 3, 1024),
    TokenTile(_MULTIPLIED_PLAIN, 32, 64, 16, 4, 3, 0),
)
"""Of float32, whose products need more registers."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedLinear:
    """A weight as it is, with its bias `[out]`; `can_keep` has said yes."""

    values: torch.Tensor
    """`[out, in]`, those of FP8 as int8: not every device that Triton compiles for has the type; INT4: see `_paired`."""
    scales: torch.Tensor
    offsets: torch.Tensor | None
    """None if there are none; of INT4 besides the 8 that kernels take from each value."""
    bias: torch.Tensor | None
    form: QuantForm
    num_inputs: int
    group: int
    pair: int
    """Inputs from the one in the low half of a byte of INT4 to that in the high half; other forms do not ask."""
    dtype: torch.dtype

    @classmethod
    def of(cls, weight: QuantizedWeight, bias: torch.Tensor | None) -> QuantizedLinear:
        """For a weight that `can_keep` takes."""
        is_int4 = weight.form is QuantForm.INT4
        pair = _pair(weight) if is_int4 else 0
        values = _paired(weight.values, pair) if is_int4 else weight.values.view(torch.int8)
        offsets = weight.offsets
        if is_int4:
            offsets = None if weight.is_symmetric else 8 * weight.scales + (0 if offsets is None else offsets)
        sizes = weight.num_inputs, weight.group, pair
        return cls(values, weight.scales, offsets, bias, weight.form, *sizes, weight.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X `[T, in]`, any stride over T → `[T, out]`."""
        num_outputs = len(self.values)
        Dims(**{"in": self.num_inputs}).check("x", x, ("T", "in"), self.dtype, self.values.device)
        out = torch.empty(len(x), num_outputs, dtype=x.dtype, device=x.device)
        if not out.numel():
            return out
        if len(x) > _MULTIPLIED_PLAIN:
            return torch.nn.functional.linear(x, self._dequantized(), self.bias)
        sizes = _tile_for(len(x), x.dtype)
        tile = _constants(sizes, self.form, self.group, self.num_inputs, self.pair)
        num_splits, split_bytes = _splits(sizes, *self.values.shape, tile["WIDTH"])
        parts = out if num_splits == 1 else x.new_empty((num_splits, *out.shape), dtype=torch.float32)
        has_bias = self.bias is not None
        bias = out if self.bias is None else self.bias
        blocks = triton.cdiv(num_outputs, sizes.block_outputs), triton.cdiv(len(x), sizes.block_tokens)
        _quantized_linear[(*blocks, num_splits)](
            *(x, self._group_sums(x), self.values, *self._tables(), bias, parts),
            *(len(x), *self.values.shape, x.stride(0), self.scales.shape[1], split_bytes),
            **self._form(),
            HAS_BIAS=has_bias and num_splits == 1,
            **tile,
            **launch_options(sizes.num_warps, sizes.num_stages),
        )
        if num_splits > 1:
            _add_splits[(triton.cdiv(out.numel(), _ADDED),)](
                *(parts, bias, out, num_splits, out.numel(), num_outputs),
                HAS_BIAS=has_bias,
                BLOCK=_ADDED,
                **launch_options(_WHOLE_WARPS),
            )
        return out

    def _group_sums(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, in / group]` float32, what offsets are multiplied with; scales stand for it where there are none."""
        if self.offsets is None:
            return self.scales
        sums = self.scales.new_empty(len(x), self.scales.shape[1])
        sizes = x.stride(0), self.scales.shape[1], self.group
        _sum_groups[tuple(sums.shape)](x, sums, *sizes, BLOCK=_SUMMED, **launch_options(1))
        return sums

    def _tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and offsets; scales twice where there are none."""
        return self.scales, self.scales if self.offsets is None else self.offsets

    def _form(self) -> dict[str, int | bool]:
        """Compile-time arguments that say what a value means."""
        return {"FORM": _CODES[self.form], "HAS_OFFSETS": self.offsets is not None, "PAIR": self.pair}

    def _dequantized(self) -> torch.Tensor:
        """The weight `[out, in]`, each element rounded once to the activations' dtype."""
        num_outputs, row_bytes = self.values.shape
        plain = torch.empty(num_outputs, self.num_inputs, dtype=self.dtype, device=self.values.device)
        _dequantize[(num_outputs, triton.cdiv(row_bytes, _DEQUANTIZED))](
            *(self.values, *self._tables(), plain),
            *(row_bytes, self.scales.shape[1], self.group),
            **self._form(),
            BLOCK=_DEQUANTIZED,
            **launch_options(_WHOLE_WARPS),
        )
        return plain


def _pair(weight: QuantizedWeight) -> int:
    """A group, so that a tile of bytes has two; or a part of one where their number is odd."""
    halved = weight.num_inputs // 2
    return weight.group if halved % weight.group == 0 else math.gcd(weight.group // 2, _WIDTHS[0])


def _paired(values: torch.Tensor, pair: int) -> torch.Tensor:
    """INT4 values `[out, in / 2]` with inputs i and i + `pair` in a byte instead of i and i + 1.

    So those in the low halves of a few bytes meet activations that lie one after the other.
    """
    paired = torch.empty_like(values)
    rows = max(1, _PAIRED_AT_ONCE // values.shape[1])
    for some, into in zip(values.split(rows), paired.split(rows), strict=True):
        inputs = unpack_int4(some).view(len(some), -1, 2, pair)
        into.copy_((inputs[:, :, 0] | inputs[:, :, 1] << 4).flatten(1))
    return paired


def _tile_for(num_tokens: int, dtype: torch.dtype) -> TokenTile:
    tiles = _WIDE_TILES if dtype is torch.float32 else _TILES
    return next(each for each in tiles if num_tokens <= each.most_tokens)


def _constants(sizes: TokenTile, form: QuantForm, group: int, num_inputs: int, pair: int) -> dict[str, int | bool]:
    """Compile-time arguments that say how a product is cut."""
    run = pair if form is QuantForm.INT4 else group
    return {
        "GROUP": 0 if group == num_inputs else group,
        "BLOCK_TOKENS": sizes.block_tokens,
        "BLOCK_OUTPUTS": sizes.block_outputs,
        "WIDTH": next(width for width in _WIDTHS if width <= sizes.width and run % width == 0),
    }


def _splits(sizes: TokenTile, num_outputs: int, row_bytes: int, width: int) -> tuple[int, int]:
    """How many programs share the bytes of a row, and how many each has: by the weight's sizes and the tile alone."""
    wanted = sizes.wanted_programs // triton.cdiv(num_outputs, sizes.block_outputs)
    num_steps = triton.cdiv(row_bytes, width)
    steps = triton.cdiv(num_steps, max(1, min(wanted, _MOST_SPLITS, num_steps // _LEAST_STEPS)))
    return triton.cdiv(num_steps, steps), steps * width


def compile_variants(arch: int) -> Iterator[Variant]:
    """Each form in each tile; alike on every `arch`."""
    for dtype in (torch.bfloat16, torch.float32):
        for form, group, has_offsets in (
            (QuantForm.INT8, 4096, False),
            (QuantForm.INT8, 16, True),
            (QuantForm.INT4, 128, True),
            (QuantForm.INT4, 32, False),
            (QuantForm.FP8, 4096, False),
            (QuantForm.FP8, 128, False),
        ):
            pair = group if form is QuantForm.INT4 else 0
            flags = {"FORM": _CODES[form], "HAS_OFFSETS": has_offsets, "PAIR": pair}
            types = {**dict.fromkeys(("x", "bias", "out"), POINTERS[dtype]), "values": _VALUES[form]}
            label = f"{POINTERS[dtype][1:]} {form} by {group}"
            for sizes in _WIDE_TILES if dtype is torch.float32 else _TILES:
                constexprs = {**flags, **_constants(sizes, form, group, 4096, pair)}
                name = f"{label} T={sizes.most_tokens}"
                for parts in dict.fromkeys((POINTERS[dtype], "*fp32" if sizes.wanted_programs else POINTERS[dtype])):
                    is_whole = parts == POINTERS[dtype]
                    yield _variant(
                        _quantized_linear,
                        {**types, "out": parts},
                        {**constexprs, "HAS_BIAS": is_whole},
                        (sizes.num_warps, sizes.num_stages),
                        name if is_whole else f"{name} shared",
                    )
            yield _variant(_dequantize, types, {**flags, "BLOCK": _DEQUANTIZED}, (_WHOLE_WARPS, 1), f"{label} plain")
        yield _variant(
            _sum_groups, {"x": POINTERS[dtype]}, {"BLOCK": _SUMMED}, (1, 1), f"{POINTERS[dtype][1:]} group sums"
        )
        yield Variant(
            kernel=_add_splits,
            signature={"parts": "*fp32", **dict.fromkeys(("bias", "out"), POINTERS[dtype])},
            constexprs={"HAS_BIAS": True, "BLOCK": _ADDED},
            num_warps=_WHOLE_WARPS,
            label=f"quantized {POINTERS[dtype][1:]} add splits",
            aligned=frozenset(("num_outputs",)),
        )


def _variant(
    kernel: Any, types: Mapping[str, str], constexprs: Mapping[str, int | bool], options: tuple[int, int], label: str
) -> Variant:
    """`options`: warps and stages."""
    return Variant(
        kernel=kernel,
        signature={**types, **dict.fromkeys(("sums", "scales", "offsets"), "*fp32")},
        constexprs=constexprs,
        num_warps=options[0],
        num_stages=options[1],
        label=f"quantized {label}",
        aligned=frozenset(("num_outputs", "row_bytes", "x_stride", "group", "split_bytes")),
    )


@triton.jit
def _first_input(byte, PAIR: tl.constexpr):
    """The input in the low half of a byte of INT4."""
    return byte + byte // PAIR * PAIR


@triton.jit
def _multiplied(
    total, wide, x_at, first, has_token, sums_at, scale_at, offset_at, has_output,
    GROUP: tl.constexpr, HAS_OFFSETS: tl.constexpr,
):  # fmt: skip
    """Adds a tile's products, of inputs from `first` on, to `total` `[outputs, tokens]`; without scales if all share one."""
    rows = tl.load(x_at + first, mask=has_token[None, :], other=0.0)
    if GROUP == 0:
        return tl.dot(wide, rows, total, input_precision="ieee")
    else:
        part = tl.dot(wide, rows, input_precision="ieee")
        at = first // GROUP
        has_sum = has_token & (first % GROUP == 0)  # once for a group, which may have several tiles
        return total + _scaled(part, sums_at + at, has_sum, scale_at + at, offset_at + at, has_output, HAS_OFFSETS)


@triton.jit
def _scaled(total, sums_at, has_sum, scale_at, offset_at, has_output, HAS_OFFSETS: tl.constexpr):
    """What a sum of products means, once its scale and offset are known."""
    total *= tl.load(scale_at, mask=has_output, other=0.0)[:, None]
    if HAS_OFFSETS:
        sums = tl.load(sums_at, mask=has_sum, other=0.0)
        total += tl.load(offset_at, mask=has_output, other=0.0)[:, None] * sums[None, :]
    return total


@triton.jit(do_not_specialize=["num_tokens"])
def _quantized_linear(
    x, sums, values, scales, offsets, bias, out,
    num_tokens, num_outputs, row_bytes, x_stride, num_groups, split_bytes,
    FORM: tl.constexpr, HAS_OFFSETS: tl.constexpr, PAIR: tl.constexpr, HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid `[ceil(outputs / BLOCK_OUTPUTS), ceil(T / BLOCK_TOKENS), splits]`; writes `out` `[splits, T, outputs]`.

    The weight is the product's left side, which the matrix units read from registers.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    outputs = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    tokens = tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    split = tl.program_id(2)
    has_output, has_token = outputs < num_outputs, tokens < num_tokens
    within = tl.arange(0, WIDTH)
    value_at = values + outputs[:, None].to(tl.int64) * row_bytes + within[None, :]
    x_at = x + tokens[None, :].to(tl.int64) * x_stride + within[:, None]
    scale_at = scales + outputs.to(tl.int64) * num_groups
    offset_at = offsets + outputs.to(tl.int64) * num_groups
    sums_at = sums + tokens.to(tl.int64) * num_groups
    total = tl.zeros((BLOCK_OUTPUTS, BLOCK_TOKENS), tl.float32)
    begin = split * split_bytes
    for byte in range(begin, tl.minimum(begin + split_bytes, row_bytes), WIDTH):
        codes = tl.load(value_at + byte, mask=has_output[:, None], other=0)
        if FORM == 1:
            low, high = from_int4(codes, dtype)
            first = _first_input(byte, PAIR)
            total = _multiplied(
                total, low, x_at, first, has_token, sums_at, scale_at, offset_at, has_output, GROUP, HAS_OFFSETS
            )
            total = _multiplied(
                total, high, x_at, first + PAIR, has_token, sums_at, scale_at, offset_at, has_output, GROUP, HAS_OFFSETS
            )
        else:
            wide = from_float8(codes, dtype) if FORM == 2 else from_int8(codes, dtype)
            total = _multiplied(
                total, wide, x_at, byte, has_token, sums_at, scale_at, offset_at, has_output, GROUP, HAS_OFFSETS
            )
    if GROUP == 0:
        total = _scaled(total, sums_at, has_token & (split == 0), scale_at, offset_at, has_output, HAS_OFFSETS)
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=has_output, other=0.0).to(tl.float32)[:, None]
    out_rows = split.to(tl.int64) * num_tokens + tokens
    out_at = out + out_rows[None, :] * num_outputs + outputs[:, None]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=has_token[None, :] & has_output[:, None])


@triton.jit
def _sum_groups(x, sums, x_stride, num_groups, group, BLOCK: tl.constexpr):
    """Grid `[T, groups]`: `sums` `[T, groups]`, a token's inputs of each group added up."""
    token, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, group, BLOCK):
        within = first + tl.arange(0, BLOCK)
        total += tl.load(x + token * x_stride + number * group + within, mask=within < group, other=0.0).to(tl.float32)
    tl.store(sums + token * num_groups + number, tl.sum(total, 0))


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
    FORM: tl.constexpr, HAS_OFFSETS: tl.constexpr, PAIR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid `[outputs, ceil(row_bytes / BLOCK)]`: a piece of a row."""
    output = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = byte < row_bytes
    codes = tl.load(values + output * row_bytes + byte, mask=there, other=0)
    scale_at, offset_at = scales + output * num_groups, offsets + output * num_groups
    if FORM == 1:
        out_at = out + output * row_bytes * 2
        low, high = from_int4(codes, tl.float32)
        first = _first_input(byte, PAIR)
        _store_meant(low, first, there, scale_at, offset_at, group, out_at, HAS_OFFSETS)
        _store_meant(high, first + PAIR, there, scale_at, offset_at, group, out_at, HAS_OFFSETS)
    else:
        wide = from_float8(codes, tl.float32) if FORM == 2 else from_int8(codes, tl.float32)
        _store_meant(wide, byte, there, scale_at, offset_at, group, out + output * row_bytes, HAS_OFFSETS)


@triton.jit
def _store_meant(wide, inputs, there, scale_at, offset_at, group, out_at, HAS_OFFSETS: tl.constexpr):
    """Writes what values of one row stand for."""
    wide *= tl.load(scale_at + inputs // group, mask=there, other=0.0)
    if HAS_OFFSETS:
        wide += tl.load(offset_at + inputs // group, mask=there, other=0.0)
    tl.store(out_at + inputs, wide.to(out_at.dtype.element_ty), mask=there)
