"""Causal attention of ragged prompts and chunks over a paged context (FlashAttention-2, arXiv 2307.08691).

A program owns one KV head and BLOCK_M query rows of one seq. A row is one head of one token:
the G query heads of a KV head stand side by side (row r is token r // G, head r % G), so each
key tile serves all of them. Keys of earlier steps are read from the pool through the block
table, this step's own from the ragged batch. Only tiles that a mask cuts are masked.

Seqs that compute one token are left to `kernels.triton.decode`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.attention import AttentionMetadata, AttentionParams
from kernels.triton.configs import KernelConfig, arch_of, attention_config
from kernels.triton.tile import (
    INDEX_TENSORS,
    NOTHING_YET,
    QUANT,
    UNSEEN,
    attention_variant,
    averaged,
    constants,
    fold,
    load_tile,
    pool_arguments,
    pool_rows,
    row_scales,
    score_factors,
    scores,
    with_sink,
)
from kernels.triton.variant import POINTERS, Variant, launch_options


@triton.jit
def _seq_of_tile(cu_seqlens_q, num_seqs, tile, group, BLOCK_M: tl.constexpr):
    """The seq that a tile belongs to: the last whose first tile, `cu_seqlens_q[b] * G // BLOCK_M + b`, is not later.

    That numbering needs no table of tiles; each seq has at most one tile that turns out empty.
    """
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_q + middle) * group // BLOCK_M + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _sweep(
    largest, total, acc, q, k_base, v_base, stride_k, stride_v, block_table, stride_block,
    begin, end, limit, rows_at, window, cap_factor, factor, k_scales, v_scales,
    PAGED: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    """Folds in keys `begin … end` of the `limit` that there are; `rows_at` `[M]` counts from the same origin.

    PAGED: keys are the seq's positions, looked up in the pool; otherwise they follow one another at `k_base`.
    """
    within = tl.arange(0, BLOCK_N)
    for first in range(begin, end, BLOCK_N):
        keys_at = first + within
        stored = keys_at < limit
        places = tl.minimum(keys_at, limit - 1) if MASKED else keys_at  # in the pool; beyond the last, that one
        k_rows = within * stride_k
        v_rows = within * stride_v
        if not PAGED:
            offset = tl.cast(first, tl.int64)
            k_tile_base = k_base + offset * stride_k
            v_tile_base = v_base + offset * stride_v
        elif BLOCK_SIZE % BLOCK_N == 0:  # one block holds the whole tile
            offset = tl.load(block_table + first // BLOCK_SIZE).to(tl.int64) * stride_block
            k_tile_base = k_base + offset + (first % BLOCK_SIZE) * stride_k
            v_tile_base = v_base + offset + (first % BLOCK_SIZE) * stride_v
        else:
            k_rows = pool_rows(block_table, places, stride_block, stride_k, BLOCK_SIZE)
            v_rows = k_rows
            k_tile_base = k_base
            v_tile_base = v_base
        keys = load_tile(k_tile_base, k_rows, stored, MASKED, HEAD_DIM, BLOCK_D)
        key_scales = row_scales(k_scales, block_table, places, stride_block, BLOCK_SIZE, QUANT)
        s = scores(q, keys, key_scales, cap_factor, CAPPED, QUANT)
        if MASKED:
            seen = (keys_at[None, :] <= rows_at[:, None]) & stored[None, :]
            if WINDOWED:
                seen &= keys_at[None, :] > rows_at[:, None] - window
            s = tl.where(seen, s, UNSEEN)
        values = load_tile(v_tile_base, v_rows, stored, MASKED, HEAD_DIM, BLOCK_D)
        value_scales = row_scales(v_scales, block_table, places, stride_block, BLOCK_SIZE, QUANT)
        largest, total, acc = fold(s, values, value_scales, factor, largest, total, acc, q.dtype, QUANT)
    return largest, total, acc


@triton.jit
def _sweep_edges_apart(
    largest, total, acc, q, k_base, v_base, stride_k, stride_v, block_table, stride_block,
    first_row, last_row, limit, rows_at, window, cap_factor, factor, k_scales, v_scales,
    PAGED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    QUANT: tl.constexpr,
):  # fmt: skip
    """Folds in all keys that rows `first_row … last_row` see: the window's edge masked, a middle not, the end masked.

    The three parts start at multiples of BLOCK_N; each may be empty.
    """
    end = tl.minimum(last_row + 1, limit)
    middle = 0
    if WINDOWED:
        begin = tl.maximum(first_row - window + 1, 0) // BLOCK_N * BLOCK_N
        middle = tl.minimum(tl.cdiv(tl.maximum(last_row - window + 1, 0), BLOCK_N) * BLOCK_N, end)
        largest, total, acc = _sweep(
            largest, total, acc, q, k_base, v_base, stride_k, stride_v, block_table, stride_block,
            begin, middle, limit, rows_at, window, cap_factor, factor, k_scales, v_scales,
            PAGED, True, WINDOWED, CAPPED, HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, QUANT,
        )  # fmt: skip
    middle_end = tl.maximum(tl.minimum(first_row + 1, limit) // BLOCK_N * BLOCK_N, middle)
    largest, total, acc = _sweep(
        largest, total, acc, q, k_base, v_base, stride_k, stride_v, block_table, stride_block,
        middle, middle_end, limit, rows_at, window, cap_factor, factor, k_scales, v_scales,
        PAGED, False, WINDOWED, CAPPED, HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, QUANT,
    )  # fmt: skip
    return _sweep(
        largest, total, acc, q, k_base, v_base, stride_k, stride_v, block_table, stride_block,
        middle_end, end, limit, rows_at, window, cap_factor, factor, k_scales, v_scales,
        PAGED, True, WINDOWED, CAPPED, HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, QUANT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_seqs", "num_tiles", "stride_table"], do_not_specialize_on_alignment=INDEX_TENSORS)
def prefill_kernel(
    q, k, v, kv_layer, scales, sinks, out, cu_seqlens_q, seq_lens, block_tables,
    num_seqs, num_tiles, num_kv_heads, group,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
    stride_block, stride_side, stride_head, stride_slot, stride_table,
    window, cap_factor, factor,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SUNK: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CONTEXT_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    """Grid `[num_tiles * Hkv]`; the last tiles of a seq see most keys and go first."""
    kv_head = tl.program_id(0) % num_kv_heads
    tile = num_tiles - 1 - tl.program_id(0) // num_kv_heads
    seq = _seq_of_tile(cu_seqlens_q, num_seqs, tile, group, BLOCK_M)
    start = tl.load(cu_seqlens_q + seq)
    query_len = tl.load(cu_seqlens_q + seq + 1) - start
    first_row = (tile - start * group // BLOCK_M - seq) * BLOCK_M
    if query_len == 1 or first_row >= query_len * group:
        return
    context_len = tl.load(seq_lens + seq) - query_len
    rows = first_row + tl.arange(0, BLOCK_M)
    tokens = rows // group  # [M], counted from the step's first
    heads = kv_head * group + rows % group
    valid = tokens < query_len
    first_token = first_row // group
    last_token = tl.minimum((first_row + BLOCK_M - 1) // group, query_len - 1)
    first_q = start.to(tl.int64)  # row of the ragged batch
    q_tile = load_tile(q, (first_q + tokens) * stride_qt + heads * stride_qh, valid, True, HEAD_DIM, BLOCK_D)

    largest = tl.full([BLOCK_M], NOTHING_YET, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    pool = kv_layer + tl.cast(kv_head, tl.int64) * stride_head
    table = block_tables + tl.cast(seq, tl.int64) * stride_table
    k_scales = scales + tl.cast(kv_head, tl.int64) * (stride_head // 4)
    paged_len = context_len + (query_len if QUANT else 0)  # all of quantized KV is read as it is stored
    largest, total, acc = _sweep_edges_apart(
        largest, total, acc, q_tile, pool, pool + stride_side, stride_slot, stride_slot, table, stride_block,
        context_len + first_token, context_len + last_token, paged_len, context_len + tokens,
        window, cap_factor, factor, k_scales, k_scales + stride_side // 4,
        True, WINDOWED, CAPPED, HEAD_DIM, BLOCK_D, CONTEXT_N, BLOCK_SIZE, QUANT,
    )  # fmt: skip
    if not QUANT:
        largest, total, acc = _sweep_edges_apart(
            largest, total, acc, q_tile, k + first_q * stride_kt + kv_head * stride_kh,
            v + first_q * stride_vt + kv_head * stride_vh, stride_kt, stride_vt, table, stride_block,
            first_token, last_token, query_len, tokens, window, cap_factor, factor, k_scales, k_scales,
            False, WINDOWED, CAPPED, HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, QUANT,
        )  # fmt: skip

    # Computed again, by other formulas than above: the compiler would otherwise hold the first results in
    # registers through all the loops, and spill.
    rows = first_row + tl.arange(0, BLOCK_M)
    tokens = (rows + group) // group - 1
    heads = kv_head * group + rows - tokens * group
    columns = tl.arange(0, BLOCK_D)
    pointers = out + ((first_q + tokens) * (num_kv_heads * group) + heads)[:, None] * HEAD_DIM + columns[None, :]
    stored = (tokens < query_len)[:, None] & (columns < HEAD_DIM)[None, :]
    averages = averaged(with_sink(total, largest, sinks + heads, SUNK), acc)
    tl.store(pointers, averages.to(out.dtype.element_ty), mask=stored)


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layer: torch.Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
    out: torch.Tensor,
) -> None:
    """Attends for every seq that computes two tokens or more; writes their rows of `out` `[T, H, D]`, contiguous.

    Arguments are those of `AttentionBackend.attend`, checked by the caller.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_layer.shape[2:4]
    num_seqs = len(metadata.query_lens_host)
    group = num_heads // num_kv_heads
    config = attention_config("prefill", head_dim, q.dtype, arch_of(q.device))
    num_tiles = num_tokens * group // config.block_m + num_seqs
    windowed, window = params.sliding_window is not None, params.sliding_window or 0
    cap_factor, factor = score_factors(params)
    prefill_kernel[(num_tiles * num_kv_heads,)](
        q, k, v, *pool_arguments(kv_layer), q if params.sinks is None else params.sinks, out,
        metadata.cu_seqlens_q, metadata.seq_lens, metadata.block_tables,
        num_seqs, num_tiles, num_kv_heads, group,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        *kv_layer.stride()[:4], metadata.block_tables.stride(0),
        window, cap_factor, factor,
        **constants(
            config, head_dim, block_size, windowed=windowed, capped=params.soft_cap is not None,
            sunk=params.sinks is not None, quant=QUANT.get(kv_layer.dtype, 0),
        ),
        CONTEXT_N=_context_tile(config),
        **launch_options(config.num_warps, config.num_stages),
    )  # fmt: skip


def compile_variants(arch: int) -> Iterator[Variant]:
    """Every head_dim and dtype with its shipped tiles; masks and large blocks where they are common."""

    def variant(head_dim: int, dtype: torch.dtype = torch.bfloat16, **kind: Any) -> Variant:
        context_n = _context_tile(attention_config("prefill", head_dim, dtype, arch))
        return attention_variant(prefill_kernel, "prefill", arch, head_dim, dtype, CONTEXT_N=context_n, **kind)

    for head_dim in (64, 80, 96, 128, 256):
        yield from (variant(head_dim, dtype) for dtype in POINTERS)
    for head_dim, block_size in ((64, 16), (128, 1), (128, 256), (256, 256)):
        yield variant(head_dim, block_size=block_size, has_edges=True)
    yield variant(64, has_edges=True, sunk=True)
    yield from (variant(128, quant=quant) for quant in QUANT.values())


def _context_tile(config: KernelConfig) -> int:
    """Keys of a tile read from the pool: their addresses, one per key, take registers that wide tiles lack."""
    return min(config.block_n, 64)
