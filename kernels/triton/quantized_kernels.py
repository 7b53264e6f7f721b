"""Device code of `kernels.triton.quantized`: products of weights that are widened in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.narrow import from_exponent, from_float4, from_float8, from_int4, from_int8


@triton.jit
def _first_input(byte, PAIR: tl.constexpr):
    """The input in the low half of a byte of 4-bit values."""
    return byte + byte // PAIR * PAIR


@triton.jit
def _multiplied(
    total, wide, x_at, first, has_token, sums_at, scale_at, offset_at, has_output,
    GROUP: tl.constexpr, HAS_OFFSETS: tl.constexpr,
):  # fmt: skip
    """Adds the products of inputs from `first` on to `total` `[outputs, tokens]`; without GROUP they are not scaled."""
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
    total *= from_exponent(tl.load(scale_at, mask=has_output, other=0))[:, None]
    if HAS_OFFSETS:
        sums = tl.load(sums_at, mask=has_sum, other=0.0)
        total += tl.load(offset_at, mask=has_output, other=0.0)[:, None] * sums[None, :]
    return total


@triton.jit
def _rows_of_tile(ends, tile, num_experts, EXPERTS: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """`(expert, first, end)`: whose rows a tile has, its first and the one behind that expert's last; 0, 0, 0 of a tile
    beyond all. Tiles are counted over experts in order, and one that has no rows has no tile.
    """
    experts = tl.arange(0, EXPERTS)
    end = tl.load(ends + experts, mask=experts < num_experts, other=0)
    begin = tl.load(ends + experts - 1, mask=(experts > 0) & (experts < num_experts), other=0)
    num_tiles = (end - begin + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    behind = tl.cumsum(num_tiles, 0)
    place = tile - (behind - num_tiles)
    is_its = (place >= 0) & (tile < behind)
    first = tl.sum(tl.where(is_its, begin + place * BLOCK_TOKENS, 0), 0)
    return tl.sum(tl.where(is_its, experts, 0), 0), first, tl.sum(tl.where(is_its, end, 0), 0)


@triton.jit(do_not_specialize=["num_tokens", "num_experts"], do_not_specialize_on_alignment=["ends"])
def quantized_linear_kernel(
    x, sums, values, scales, offsets, bias, out, ends,
    num_tokens, num_outputs, row_bytes, x_stride, num_groups, split_bytes, num_experts,
    FORM: tl.constexpr, HAS_OFFSETS: tl.constexpr, PAIR: tl.constexpr, HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, WIDTH: tl.constexpr,
    EXPERTS: tl.constexpr,
):  # fmt: skip
    """Grid `[ceil(outputs / BLOCK_OUTPUTS), ceil(T / BLOCK_TOKENS), splits]`; writes `out` `[splits, T, outputs]`.

    The weight is the product's left side, which the matrix units read from registers. EXPERTS 0: one weight. Else a
    power of 2 that holds `num_experts`, whose weights and biases lie one below the other and whose rows end at `ends`.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    outputs = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    first_token, end_token = tl.program_id(1) * BLOCK_TOKENS, num_tokens
    weight_rows = outputs.to(tl.int64)
    if EXPERTS:
        expert, first_token, end_token = _rows_of_tile(ends, tl.program_id(1), num_experts, EXPERTS, BLOCK_TOKENS)
        if first_token >= end_token:
            return
        weight_rows += expert.to(tl.int64) * num_outputs
    tokens = first_token + tl.arange(0, BLOCK_TOKENS)
    split = tl.program_id(2)
    has_output, has_token = outputs < num_outputs, tokens < end_token
    within = tl.arange(0, WIDTH)
    value_at = values + weight_rows[:, None] * row_bytes + within[None, :]
    x_at = x + tokens[None, :].to(tl.int64) * x_stride + within[:, None]
    scale_at = scales + weight_rows * num_groups
    offset_at = offsets + weight_rows * num_groups
    sums_at = sums + tokens.to(tl.int64) * num_groups
    total = tl.zeros((BLOCK_OUTPUTS, BLOCK_TOKENS), tl.float32)
    begin = split * split_bytes
    for byte in range(begin, tl.minimum(begin + split_bytes, row_bytes), WIDTH):
        codes = tl.load(value_at + byte, mask=has_output[:, None], other=0)
        if PAIR:
            low, high = from_float4(codes, dtype) if FORM == 3 else from_int4(codes, dtype)
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
        total += tl.load(bias + weight_rows, mask=has_output, other=0.0).to(tl.float32)[:, None]
    out_rows = split.to(tl.int64) * num_tokens + tokens
    out_at = out + out_rows[None, :] * num_outputs + outputs[:, None]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=has_token[None, :] & has_output[:, None])


@triton.jit
def sum_groups_kernel(x, sums, x_stride, num_groups, group, BLOCK: tl.constexpr):
    """Grid `[T, groups]`: `sums` `[T, groups]`, a token's inputs of each group added up."""
    token, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, group, BLOCK):
        within = first + tl.arange(0, BLOCK)
        total += tl.load(x + token * x_stride + number * group + within, mask=within < group, other=0.0).to(tl.float32)
    tl.store(sums + token * num_groups + number, tl.sum(total, 0))


@triton.jit(do_not_specialize=["num_splits", "num_elements"])
def add_splits_kernel(
    parts, bias, out, num_splits, num_elements, num_outputs, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):
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
def dequantize_kernel(
    values, scales, offsets, out, row_bytes, num_groups, group,
    FORM: tl.constexpr, HAS_OFFSETS: tl.constexpr, PAIR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid `[outputs, ceil(row_bytes / BLOCK)]`: a piece of a row."""
    output = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = byte < row_bytes
    codes = tl.load(values + output * row_bytes + byte, mask=there, other=0)
    scale_at, offset_at = scales + output * num_groups, offsets + output * num_groups
    if PAIR:
        out_at = out + output * row_bytes * 2
        low, high = from_float4(codes, tl.float32) if FORM == 3 else from_int4(codes, tl.float32)
        first = _first_input(byte, PAIR)
        _store_meant(low, first, there, scale_at, offset_at, group, out_at, HAS_OFFSETS)
        _store_meant(high, first + PAIR, there, scale_at, offset_at, group, out_at, HAS_OFFSETS)
    else:
        wide = from_float8(codes, tl.float32) if FORM == 2 else from_int8(codes, tl.float32)
        _store_meant(wide, byte, there, scale_at, offset_at, group, out + output * row_bytes, HAS_OFFSETS)


@triton.jit
def _store_meant(wide, inputs, there, scale_at, offset_at, group, out_at, HAS_OFFSETS: tl.constexpr):
    """Writes the dequantised values of a row."""
    wide *= from_exponent(tl.load(scale_at + inputs // group, mask=there, other=0))
    if HAS_OFFSETS:
        wide += tl.load(offset_at + inputs // group, mask=there, other=0.0)
    tl.store(out_at + inputs, wide.to(out_at.dtype.element_ty), mask=there)
