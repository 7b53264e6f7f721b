"""What prefill and decode do with one tile of keys: load it, score it, fold it into the softmax.

The softmax is online and in base 2 (FlashAttention-2, arXiv 2307.08691, algorithm 1): each row
keeps the largest scaled score so far, the sum of weights relative to it and the weighted sum of
values.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.attention import AttentionParams
from kernels.quantized_kv import is_quantized, kv_scales
from kernels.triton.configs import AttentionKernel, KernelConfig, attention_config
from kernels.triton.narrow import from_float8, from_int8
from kernels.triton.variant import POINTERS, Variant

UNSEEN = tl.constexpr(float("-inf"))
"""Score of a masked key: it weighs 2 ** -inf = 0, whatever the row has seen. A finite one would not: a GPU takes the
factor of a score and the row's largest off it in one rounding, and the two roundings of -1e30 lie far apart."""
NOTHING_YET = tl.constexpr(-1.0e30)
"""Largest score of a row that has seen no key. Finite, so that there is no inf - inf."""

EXACT = tl.constexpr("ieee")
"""Products of float32 are not rounded to TF32. Three products of TF32 would run on the matrix units,
but hold so many registers that wide heads spill; float32 is served to compare, not to be fast."""


INDEX_TENSORS = ("cu_seqlens_q", "seq_lens", "block_tables")
"""Arguments of which a step may pass a slice, anywhere in memory: a kernel that relied on their alignment would be
compiled again for the first slice that lacks it."""


def padded_head_dim(head_dim: int) -> int:
    """Width of a tile: a power of 2, at least the 16 that a matrix product needs."""
    return max(16, 1 << (head_dim - 1).bit_length())


def score_factors(params: AttentionParams) -> tuple[float, float]:
    """`(cap_factor, factor)` for `scores` and `fold`: what q·k and what a score is multiplied by, in base 2."""
    if params.soft_cap is None:
        return 0.0, params.scale * math.log2(math.e)
    return 2 * params.scale / params.soft_cap * math.log2(math.e), params.soft_cap * math.log2(math.e)


QUANT = {torch.int8: 1, torch.float8_e4m3fn: 2}
QUANT_LABELS = ("", " int8", " fp8")
"""How kernels and their variants call each kind of quantized KV; 0 is plain. e4m3 goes as bytes, which devices before
sm_89 load too."""


def pool_arguments(kv_layer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`(kv_layer, scales)` as kernels take them, the scales as floats; plain KV stands for those that it lacks."""
    return (kv_layer.view(torch.int8), kv_scales(kv_layer)) if is_quantized(kv_layer) else (kv_layer, kv_layer)


def constants(
    config: KernelConfig,
    head_dim: int,
    block_size: int,
    *,
    windowed: bool,
    capped: bool,
    sunk: bool = False,
    quant: int = 0,
) -> dict[str, int | bool]:
    """Compile-time arguments of both kernels."""
    return {
        "WINDOWED": windowed,
        "CAPPED": capped,
        "SUNK": sunk,
        "HEAD_DIM": head_dim,
        "BLOCK_D": padded_head_dim(head_dim),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_SIZE": block_size,
        "QUANT": quant,
    }


_STRIDES = (
    *("stride_qt", "stride_qh", "stride_kt", "stride_kh", "stride_vt", "stride_vh"),
    *("stride_block", "stride_side", "stride_head", "stride_slot"),
)


def attention_variant(
    kernel: Any,
    name: AttentionKernel,
    arch: int,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    block_size: int = 16,
    *,
    has_edges: bool = False,
    sunk: bool = False,
    quant: int = 0,
    **constexprs: int,
) -> Variant:
    """One compilation of the prefill or the decode kernel, whose arguments have equal names.

    With edges: with sliding window and, without sinks, soft cap. `constexprs`: of this kernel alone.
    """
    config, capped = attention_config(name, head_dim, dtype, arch), has_edges and not sunk
    constexprs |= constants(config, head_dim, block_size, windowed=has_edges, capped=capped, sunk=sunk, quant=quant)
    edges = "".join(f" {name.lower()}" for name in ("WINDOWED", "CAPPED", "SUNK") if constexprs[name])
    pool = {"kv_layer": "*i8", "scales": "*fp32"} if quant else dict.fromkeys(("kv_layer", "scales"), POINTERS[dtype])
    return Variant(
        kernel=kernel,
        signature={
            **dict.fromkeys(("q", "k", "v", "out"), POINTERS[dtype]),
            **pool,
            **dict.fromkeys(("partial_out", "partial_lse"), "*fp32"),
            "sinks": "*fp32" if sunk else POINTERS[dtype],
            **dict.fromkeys(("cu_seqlens_q", "seq_lens", "block_tables"), "*i32"),
            "stride_block": "i64",
            **dict.fromkeys(("cap_factor", "factor"), "fp32"),
        },
        constexprs=constexprs,
        num_warps=config.num_warps,
        label=f"{name} {dtype} D={head_dim} S={block_size}{edges}{QUANT_LABELS[quant]}",
        num_stages=config.num_stages,
        aligned=frozenset(_STRIDES),
    )


@triton.jit
def pool_rows(block_table, positions, stride_block, stride_slot, BLOCK_SIZE: tl.constexpr):
    """Offset in the pool of each of a seq's positions; int64, for a pool has more than 2 ** 31 elements."""
    places = positions.to(tl.uint32)  # a division that rounds down needs fewer instructions
    blocks = tl.load(block_table + places // BLOCK_SIZE)
    return blocks.to(tl.int64) * stride_block + (places % BLOCK_SIZE).to(tl.int32) * stride_slot


@triton.jit
def load_tile(base, rows, stored, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """The D elements at each of `rows` as a tile `[rows, BLOCK_D]`; zero if not `stored`, where NaN may lie."""
    columns = tl.arange(0, BLOCK_D)
    pointers = base + rows[:, None] + columns[None, :]
    if HEAD_DIM == BLOCK_D:
        if MASKED:
            return tl.load(pointers, mask=stored[:, None], other=0.0)
        else:
            return tl.load(pointers)
    elif MASKED:
        return tl.load(pointers, mask=stored[:, None] & (columns < HEAD_DIM)[None, :], other=0.0)
    else:
        return tl.load(pointers, mask=(columns < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def widened(tile, dtype: tl.constexpr, QUANT: tl.constexpr):
    """A tile of the pool as `dtype`; scales are left to `scores` and `fold`."""
    if QUANT == 1:
        return from_int8(tile, dtype)
    elif QUANT == 2:
        return from_float8(tile, dtype)
    else:
        return tile


@triton.jit
def row_scales(scales, block_table, positions, stride_block, BLOCK_SIZE: tl.constexpr, QUANT: tl.constexpr):
    """Scales of a seq's positions `[N]`, of one side and head; `stride_block` counts bytes. Of plain KV nothing."""
    if QUANT:
        return tl.load(scales + pool_rows(block_table, positions, stride_block // 4, 1, BLOCK_SIZE))
    else:
        return 0.0


@triton.jit
def scores(q, keys, key_scales, cap_factor, CAPPED: tl.constexpr, QUANT: tl.constexpr):
    """Dot products `[M, N]`; with a soft cap their tanh, as 1 - 2 / (e ** 2x + 1)."""
    s = tl.dot(q, tl.trans(widened(keys, q.dtype, QUANT)), input_precision=EXACT)
    if QUANT:
        s = s * key_scales[None, :]
    if CAPPED:
        s = 1.0 - 2.0 / (tl.exp2(s * cap_factor) + 1.0)
    return s


@triton.jit
def fold(s, values, value_scales, factor, largest, total, acc, dtype: tl.constexpr, QUANT: tl.constexpr):
    """One step of the online softmax: scores `[M, N]`, values `[N, D]` → new `largest`, `total` `[M]`, `acc`."""
    weights, shrink, largest, total = weigh(s, value_scales, factor, largest, total, dtype, QUANT)
    acc = tl.dot(weights, widened(values, dtype, QUANT), acc * shrink[:, None], input_precision=EXACT)
    return largest, total, acc


@triton.jit
def weigh(s, value_scales, factor, largest, total, dtype: tl.constexpr, QUANT: tl.constexpr):
    """Scores `[M, N]` → weights as `dtype`, what earlier sums shrink by, and the new `largest` and `total`."""
    now_largest = tl.maximum(largest, tl.max(s, 1) * factor)
    weights = tl.exp2(s * factor - now_largest[:, None])
    shrink = tl.exp2(largest - now_largest)
    total = total * shrink + tl.sum(weights, 1)
    if QUANT:
        weights = weights * value_scales[None, :]
    return weights.to(dtype), shrink, now_largest, total


@triton.jit
def with_sink(total, largest, sink_pointers, SUNK: tl.constexpr):
    """`total`, a softmax's sum relative to `largest`, and with SUNK a sink in it: a key whose value is zero.

    A sink beyond 2^120 times the largest weight counts as that much: nothing is left of the values then.
    """
    if SUNK:
        total += tl.exp2(tl.minimum(tl.load(sink_pointers) * 1.4426950408889634 - largest, 120.0))
    return total


@triton.jit
def averaged(total, acc):
    """The weighted mean of the values, `[M, D]` float32; zeros for a row that saw no key."""
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]
