"""What prefill and decode do with one tile of keys: load it, score it, fold it into the softmax.

The softmax is online and in base 2 (FlashAttention-2, arXiv 2307.08691, algorithm 1): each row
keeps the largest scaled score so far, the sum of weights relative to it and the weighted sum of
values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.attention import AttentionParams
from kernels.triton.configs import KernelConfig
from kernels.triton.variant import POINTERS, Variant

UNSEEN = tl.constexpr(-1.0e30)
"""Score of a masked key. Finite, so that a row which sees nothing of a tile has no inf - inf; what such
a tile adds is wiped out by a factor of 2 ** (UNSEEN - score) = 0 once the row sees a key, as each does."""

_EXACT = tl.constexpr("ieee")
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


def constants(
    config: KernelConfig, head_dim: int, block_size: int, *, windowed: bool, capped: bool
) -> dict[str, int | bool]:
    """Compile-time arguments of both kernels."""
    return {
        "WINDOWED": windowed,
        "CAPPED": capped,
        "HEAD_DIM": head_dim,
        "BLOCK_D": padded_head_dim(head_dim),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_SIZE": block_size,
    }


_STRIDES = (
    *("stride_qt", "stride_qh", "stride_kt", "stride_kh", "stride_vt", "stride_vh"),
    *("stride_block", "stride_side", "stride_head", "stride_slot"),
)


def attention_variant(
    kernel: Any, name: str, config: KernelConfig, dtype: torch.dtype, constexprs: Mapping[str, int | bool]
) -> Variant:
    """One compilation of either kernel; their arguments are named alike."""
    edges = " windowed capped" if constexprs["WINDOWED"] else ""
    return Variant(
        kernel=kernel,
        signature={
            **dict.fromkeys(("q", "k", "v", "kv_layer", "out"), POINTERS[dtype]),
            **dict.fromkeys(("partial_out", "partial_lse"), "*fp32"),
            **dict.fromkeys(("cu_seqlens_q", "seq_lens", "block_tables"), "*i32"),
            "stride_block": "i64",
            **dict.fromkeys(("cap_factor", "factor"), "fp32"),
        },
        constexprs=constexprs,
        num_warps=config.num_warps,
        label=f"{name} {dtype} D={constexprs['HEAD_DIM']} S={constexprs['BLOCK_SIZE']}{edges}",
        num_stages=config.num_stages,
        aligned=frozenset(_STRIDES),
    )


@triton.jit
def pool_rows(block_table, positions, stored, stride_block, stride_slot, BLOCK_SIZE: tl.constexpr):
    """Offset in the pool of each of a seq's positions; int64, for a pool has more than 2 ** 31 elements."""
    blocks = tl.load(block_table + positions // BLOCK_SIZE, mask=stored, other=0)
    return blocks.to(tl.int64) * stride_block + (positions % BLOCK_SIZE) * stride_slot


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
def scores(q, keys, cap_factor, CAPPED: tl.constexpr):
    """Dot products `[M, N]`; with a soft cap their tanh, as 1 - 2 / (e ** 2x + 1)."""
    s = tl.dot(q, tl.trans(keys), input_precision=_EXACT)
    if CAPPED:
        s = 1.0 - 2.0 / (tl.exp2(s * cap_factor) + 1.0)
    return s


@triton.jit
def fold(s, values, factor, largest, total, acc):
    """One step of the online softmax: scores `[M, N]`, values `[N, D]` → new `largest`, `total` `[M]`, `acc`."""
    now_largest = tl.maximum(largest, tl.max(s, 1) * factor)
    weights = tl.exp2(s * factor - now_largest[:, None])
    shrink = tl.exp2(largest - now_largest)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision=_EXACT)
    return now_largest, total, acc


@triton.jit
def averaged(total, acc):
    """The weighted mean of the values, `[M, D]` float32; zeros for a row that saw no key."""
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]
