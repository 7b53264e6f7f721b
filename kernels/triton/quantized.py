"""Linear maps of quantised weights: values are turned into the activations' dtype in registers, where all are exact.

    out[t, o] = sum over groups g of
                scale[o, g] * (sum over i in g of x[t, i] * value[o, i]) + offset[o, g] * (sum over i in g of x[t, i])

A program computes a tile of tokens and outputs, over all inputs or a share of them, which depends on the weight's sizes
and on the tile, never on other tokens. Sums are float32, rounded once, after the bias. Activations are not rounded
(`kernels.triton.rounding` does so). Long prompts multiply the weight dequantised, each element of it rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton

from kernels.quantized import HALF_BYTES, QuantForm, QuantizedWeight, unpack_int4
from kernels.spec import Dims
from kernels.triton.configs import arch_of, family_of
from kernels.triton.quantized_kernels import (
    add_splits_kernel,
    dequantize_kernel,
    quantized_linear_kernel,
    sum_groups_kernel,
)
from kernels.triton.variant import POINTERS, Variant, launch_options

_WIDTHS = (128, 64, 32, 16)
"""Bytes of a row in a tile, and inputs of one product; forms of 4 bits have two."""
_MOST_SPLITS = 8
_LEAST_STEPS = 4
"""Tiles of inputs that a split has at least."""
_WHOLE_WARPS = 4
"""Warps of kernels without a product."""
_SUMMED = 128
"""Inputs that a program adds up at a time."""
_ADDED = 1024
"""Elements that a program adds up over splits."""
MULTIPLIED_PLAIN = 256
"""With more tokens than that, a weight is dequantised as a whole first: on an H200 both take as long at 256
(bench/LOG.md)."""
_DEQUANTIZED = 1024
"""Bytes of a row that a program dequantises."""
_PAIRED_AT_ONCE = 1 << 24
"""Bytes."""
_EXPONENT_BIAS = 127
CODES = {QuantForm.INT8: 0, QuantForm.INT4: 1, QuantForm.FP8: 2, QuantForm.FP4: 3}
"""What the kernel calls a form."""
_MXFP4_GROUP = 32


def can_keep(weight: QuantizedWeight) -> bool:
    """Whether the kernel takes the sizes of `weight`."""
    if weight.form is QuantForm.FP4:
        return _pair(weight) % _WIDTHS[-1] == 0
    return weight.group % (32 if weight.form is QuantForm.INT4 else 16) == 0


class TokenTile(NamedTuple):
    """What a program computes of a step with `max_tokens` tokens at most."""

    most_tokens: int
    block_tokens: int
    block_outputs: int
    width: int
    """Bytes of a row at a time, at most."""
    num_warps: int
    num_stages: int
    wanted_programs: int
    """Several programs share the inputs of an output where outputs are fewer than this number of programs."""


_TILES = (
    TokenTile(8, 8, 64, 128, 4, 4, 512),
    TokenTile(16, 16, 64, 128, 2, 3, 512),
    TokenTile(32, 32, 64, 128, 2, 3, 512),
    TokenTile(64, 64, 64, 128, 4, 3, 256),
    TokenTile(MULTIPLIED_PLAIN, 128, 64, 64, 4, 3, 256),
)
"""Tiles of products in 16 bits, as a sweep on an H100 found them (bench/LOG.md)."""
_TILES_BY_WARP = (*_TILES[:-1], _TILES[-1]._replace(num_warps=8))
"""Where four warps do not multiply together, as they do on sm_90: their registers do not hold the largest tile."""
_WIDE_TILES = (
    TokenTile(16, 16, 64, 16, 4, 3, 1024),
    TokenTile(MULTIPLIED_PLAIN, 32, 64, 16, 4, 3, 0),
)
"""Tiles of products in float32, which need more registers."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldWeight:
    """A weight as the kernels read it; `can_keep` has said yes."""

    values: torch.Tensor
    """`[out, in]`, FP8 as int8, as not every device that Triton compiles for has the type; 4 bits as of `_paired`."""
    scales: torch.Tensor
    """float32, or uint8 that are exponents (e8m0) where those of FP4 are powers of 2."""
    offsets: torch.Tensor | None
    """None if there are none; of INT4 besides the 8 that kernels take from each value."""
    form: QuantForm
    num_inputs: int
    group: int
    pair: int
    """Inputs from the one in the low half of a byte to that in the high half; 0 of forms of 8 bits."""
    dtype: torch.dtype

    @classmethod
    def of(cls, weight: QuantizedWeight) -> HeldWeight:
        """For a weight that `can_keep` takes."""
        scales, offsets, pair = weight.scales, weight.offsets, _pair(weight) if weight.form in HALF_BYTES else 0
        values = _paired(weight.values, pair) if pair else weight.values.view(torch.int8)
        if weight.form is QuantForm.INT4:
            offsets = None if weight.is_symmetric else 8 * scales + (0 if offsets is None else offsets)
        if weight.form is QuantForm.FP4:
            scales = _exponents(scales)
        return cls(values, scales, offsets, weight.form, weight.num_inputs, weight.group, pair, weight.dtype)

    def check(self, x: torch.Tensor) -> None:
        """Raises InternalError, by name, if `x` is not `[T, in]` of the weight's dtype, on its device."""
        Dims(**{"in": self.num_inputs}).check("x", x, ("T", "in"), self.dtype, self.values.device)

    def operands(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns `x`, its sums by group and the weight, as the kernel takes them."""
        return x, self._group_sums(x), self.values, *self.tables()

    def _group_sums(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, in / group]` float32, what offsets are multiplied with; scales stand for it where there are none."""
        if self.offsets is None:
            return self.scales
        sums = torch.empty(len(x), self.scales.shape[1], device=x.device)
        sizes = x.stride(0), self.scales.shape[1], self.group
        sum_groups_kernel[tuple(sums.shape)](x, sums, *sizes, BLOCK=_SUMMED, **launch_options(1))
        return sums

    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and offsets; scales twice where there are none."""
        return self.scales, self.scales if self.offsets is None else self.offsets

    def meaning(self) -> dict[str, int | bool]:
        """Compile-time arguments that say what a value means."""
        return {"FORM": CODES[self.form], "HAS_OFFSETS": self.offsets is not None, "PAIR": self.pair}


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedLinear:
    """A weight in its form, with its bias `[out]`."""

    weight: HeldWeight
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X `[T, in]`, any stride over T → `[T, out]`."""
        weight = self.weight
        weight.check(x)
        num_outputs, row_bytes = weight.values.shape
        out = torch.empty(len(x), num_outputs, dtype=x.dtype, device=x.device)
        if not out.numel():
            return out
        if len(x) > MULTIPLIED_PLAIN:
            return torch.nn.functional.linear(x, self._dequantized(), self.bias)
        sizes = next(each for each in tiles_of(x.dtype, arch_of(x.device)) if len(x) <= each.most_tokens)
        tile = constants(sizes, weight.form, weight.group, weight.num_inputs, weight.pair)
        num_splits, split_bytes = _splits(sizes, num_outputs, row_bytes, tile["WIDTH"])
        parts = out if num_splits == 1 else x.new_empty((num_splits, *out.shape), dtype=torch.float32)
        has_bias = self.bias is not None
        bias = out if self.bias is None else self.bias
        blocks = triton.cdiv(num_outputs, sizes.block_outputs), triton.cdiv(len(x), sizes.block_tokens)
        quantized_linear_kernel[(*blocks, num_splits)](
            *(*weight.operands(x), bias, parts, weight.scales),
            *(len(x), num_outputs, row_bytes, x.stride(0), weight.scales.shape[1], split_bytes, 0),
            **weight.meaning(),
            HAS_BIAS=has_bias and num_splits == 1,
            EXPERTS=0,
            **tile,
            **launch_options(sizes.num_warps, sizes.num_stages),
        )
        if num_splits > 1:
            add_splits_kernel[(triton.cdiv(out.numel(), _ADDED),)](
                *(parts, bias, out, num_splits, out.numel(), num_outputs),
                HAS_BIAS=has_bias,
                BLOCK=_ADDED,
                **launch_options(_WHOLE_WARPS),
            )
        return out

    def _dequantized(self) -> torch.Tensor:
        """The weight `[out, in]`, each element rounded once to the activations' dtype."""
        weight = self.weight
        num_outputs, row_bytes = weight.values.shape
        plain = torch.empty(num_outputs, weight.num_inputs, dtype=weight.dtype, device=weight.values.device)
        dequantize_kernel[(num_outputs, triton.cdiv(row_bytes, _DEQUANTIZED))](
            *(weight.values, *weight.tables(), plain),
            *(row_bytes, weight.scales.shape[1], weight.group),
            **weight.meaning(),
            BLOCK=_DEQUANTIZED,
            **launch_options(_WHOLE_WARPS),
        )
        return plain


def _pair(weight: QuantizedWeight) -> int:
    """A group, so that a tile of bytes has two; or a part of one where their number is odd."""
    halved = weight.num_inputs // 2
    return weight.group if halved % weight.group == 0 else math.gcd(weight.group // 2, _WIDTHS[0])


def _paired(values: torch.Tensor, pair: int) -> torch.Tensor:
    """Values of 4 bits `[out, in / 2]` with inputs i and i + `pair` in a byte instead of i and i + 1.

    So those in the low halves of a few bytes meet activations that lie one after the other.
    """
    paired = torch.empty_like(values)
    rows = max(1, _PAIRED_AT_ONCE // values.shape[1])
    for some, into in zip(values.split(rows), paired.split(rows), strict=True):
        inputs = unpack_int4(some).view(len(some), -1, 2, pair)
        into.copy_((inputs[:, :, 0] | inputs[:, :, 1] << 4).flatten(1))
    return paired


def _exponents(scales: torch.Tensor) -> torch.Tensor:
    """Scales as e8m0 where they are powers of 2, of which the least, 2 ** -127, counts as 0; else as they are."""
    mantissas, exponents = torch.frexp(scales)
    codes = exponents + (_EXPONENT_BIAS - 1)
    is_exact = (mantissas == 0.5).all() and codes.min() >= 0
    return codes.to(torch.uint8) if is_exact else scales


def tiles_of(dtype: torch.dtype, arch: int) -> tuple[TokenTile, ...]:
    """Tiles of products, by the most tokens that each is for."""
    if dtype is torch.float32:
        return _WIDE_TILES
    return _TILES if family_of(arch) == "sm90" else _TILES_BY_WARP


def constants(sizes: TokenTile, form: QuantForm, group: int, num_inputs: int, pair: int) -> dict[str, int | bool]:
    """Compile-time arguments that say how a product is cut."""
    run = pair or group
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


FORMS = (
    (QuantForm.INT8, 4096, False),
    (QuantForm.INT8, 16, True),
    (QuantForm.INT4, 128, True),
    (QuantForm.INT4, 32, False),
    (QuantForm.FP8, 4096, False),
    (QuantForm.FP8, 128, False),
    (QuantForm.FP4, 32, False),
    (QuantForm.FP4, 16, False),
)
"""Form, group and whether there are offsets: what is built ahead of time."""


def types_of(form: QuantForm, group: int, dtype: torch.dtype) -> dict[str, str]:
    """Types of arguments by name, for activations of `dtype`; FP4 by 32 has exponents for scales, as MXFP4."""
    tables = "*u8" if form is QuantForm.FP4 and group == _MXFP4_GROUP else "*fp32"
    return {
        **dict.fromkeys(("x", "bias", "out"), POINTERS[dtype]),
        **dict.fromkeys(("sums", "scales", "offsets", "ends"), tables),
        "values": "*u8" if form in HALF_BYTES else "*i8",
    }


def compile_variants(arch: int) -> Iterator[Variant]:
    """Each form in each tile."""
    for dtype in (torch.bfloat16, torch.float32):
        for form, group, has_offsets in FORMS:
            pair = group if form in HALF_BYTES else 0
            flags = {"FORM": CODES[form], "HAS_OFFSETS": has_offsets, "PAIR": pair}
            types = types_of(form, group, dtype)
            label = f"{POINTERS[dtype][1:]} {form} by {group}"
            for sizes in tiles_of(dtype, arch):
                constexprs = {**flags, **constants(sizes, form, group, 4096, pair), "EXPERTS": 0}
                name = f"{label} T={sizes.most_tokens}"
                for parts in dict.fromkeys((POINTERS[dtype], "*fp32" if sizes.wanted_programs else POINTERS[dtype])):
                    is_whole = parts == POINTERS[dtype]
                    yield variant(
                        quantized_linear_kernel,
                        {**types, "out": parts},
                        {**constexprs, "HAS_BIAS": is_whole},
                        (sizes.num_warps, sizes.num_stages),
                        name if is_whole else f"{name} shared",
                    )
            yield variant(
                dequantize_kernel, types, {**flags, "BLOCK": _DEQUANTIZED}, (_WHOLE_WARPS, 1), f"{label} plain"
            )
        yield variant(
            sum_groups_kernel,
            {"x": POINTERS[dtype], "sums": "*fp32"},
            {"BLOCK": _SUMMED},
            (1, 1),
            f"{POINTERS[dtype][1:]} group sums",
        )
        yield Variant(
            kernel=add_splits_kernel,
            signature={"parts": "*fp32", **dict.fromkeys(("bias", "out"), POINTERS[dtype])},
            constexprs={"HAS_BIAS": True, "BLOCK": _ADDED},
            num_warps=_WHOLE_WARPS,
            label=f"quantized {POINTERS[dtype][1:]} add splits",
            aligned=frozenset(("num_outputs",)),
        )


def variant(
    kernel: Any, types: Mapping[str, str], constexprs: Mapping[str, int | bool], options: tuple[int, int], label: str
) -> Variant:
    """A compilation for usual sizes; `options`: warps and stages."""
    return Variant(
        kernel=kernel,
        signature=types,
        constexprs=constexprs,
        num_warps=options[0],
        num_stages=options[1],
        label=f"quantized {label}",
        aligned=frozenset(("num_outputs", "row_bytes", "x_stride", "group", "split_bytes")),
    )
