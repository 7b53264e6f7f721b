"""Attention of one token per seq over its paged keys, split over the keys (Flash-Decoding).

A split is one KV head of one seq and a run of its keys; the query heads that share the KV head are the
rows of one tile, so keys are read once for all of them. Where a seq has several splits, a second kernel
merges their results by their log-sum-exp.

The splits of all seqs, one after the other, are a list of work, which each program counts out by itself from
the lengths on the device. There are as many programs as fill the device, and each takes every so manieth
split: none is launched in vain, however far the lengths stay below what a captured graph allows.

INVARIANT: how a seq is split depends on its own length alone, so its result does not depend on
who shares the step, nor on the number of programs.

Seqs that compute more than one token are left to `kernels.triton.prefill`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.attention import AttentionMetadata, AttentionParams
from kernels.triton.configs import arch_of, attention_config
from kernels.triton.tile import (
    EXACT,
    INDEX_TENSORS,
    NOTHING_YET,
    QUANT,
    UNSEEN,
    attention_variant,
    averaged,
    constants,
    fold,
    load_tile,
    padded_head_dim,
    pool_arguments,
    pool_rows,
    row_scales,
    score_factors,
    scores,
    weigh,
    widened,
    with_sink,
)
from kernels.triton.variant import POINTERS, Variant, launch_options

MIN_SPLIT = 256
"""Keys of a split, unless the seq has more than MIN_SPLIT * MAX_SPLITS: then they get longer."""
MAX_SPLITS = 64
"""Splits of a seq at most; bounds the workspace."""
_SPLIT_STEP = 128
"""Splits start and grow by this: a multiple of every tile."""
_SPLITTING = {"MIN_SPLIT": MIN_SPLIT, "MAX_SPLITS": MAX_SPLITS, "STEP": _SPLIT_STEP}
_COUNTED = 128
"""Seqs whose splits a program counts out together."""
_PROGRAMS_PER_MULTIPROCESSOR = 8
"""More than run at a time, since splits are not all of one length: 8 were as fast as any of 1 to 8 on an H100."""
_MERGE_WARPS = 4


@triton.jit
def _splits_of(
    seq_len, window, WINDOWED: tl.constexpr, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, STEP: tl.constexpr
):
    """`(begin, split_len, num_splits)` of a seq: first key, keys per split, how many; one for an empty seq."""
    begin = 0
    if WINDOWED:
        begin = tl.maximum(seq_len - window, 0) // STEP * STEP
    even = tl.cdiv(tl.cdiv(seq_len - begin, MAX_SPLITS), STEP) * STEP
    split_len = tl.maximum(even, MIN_SPLIT)
    return begin, split_len, tl.maximum(tl.cdiv(seq_len - begin, split_len), 1)


@triton.jit(do_not_specialize=["num_seqs", "max_splits", "stride_table"], do_not_specialize_on_alignment=INDEX_TENSORS)
def decode_kernel(
    q, kv_layer, scales, out, partial_out, partial_lse, cu_seqlens_q, seq_lens, block_tables,
    num_seqs, max_splits, num_kv_heads, group,
    stride_qt, stride_qh, stride_block, stride_side, stride_head, stride_slot, stride_table,
    window, cap_factor, factor,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SUNK: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, QUANT: tl.constexpr,
    COUNTED: tl.constexpr, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Grid `[Hkv * ceil(G / BLOCK_M), P]`; a program takes splits `p`, `p + P`, `p + 2 * P`, … of all B seqs'.

    Writes `out` where the seq has one split, else `partial_out` `[B, H, max_splits, D]` and
    `partial_lse` `[B, H, max_splits]`, float32.
    """
    taken = tl.program_id(1)
    counted = 0
    for first_seq in range(0, num_seqs, COUNTED):
        seqs = first_seq + tl.arange(0, COUNTED)
        there = seqs < num_seqs
        query_lens = tl.load(cu_seqlens_q + seqs + 1, mask=there, other=0) - tl.load(
            cu_seqlens_q + seqs, mask=there, other=0
        )
        lens = tl.load(seq_lens + seqs, mask=there, other=0)
        _, _, num_splits = _splits_of(lens, window, WINDOWED, MIN_SPLIT, MAX_SPLITS, STEP)
        num_splits = tl.where(query_lens == 1, num_splits, 0)  # [COUNTED]
        ends = counted + tl.cumsum(num_splits, 0)
        end = counted + tl.sum(num_splits, 0)
        while taken < end:
            before = ends <= taken  # seqs whose splits all come before
            seq = first_seq + tl.sum(before.to(tl.int32), 0)
            split = taken - tl.max(tl.where(before, ends, counted), 0)
            _attend_split(
                q, kv_layer, scales, out, partial_out, partial_lse, cu_seqlens_q, seq_lens, block_tables,
                seq, split, max_splits, num_kv_heads, group,
                stride_qt, stride_qh, stride_block, stride_side, stride_head, stride_slot, stride_table,
                window, cap_factor, factor,
                WINDOWED, CAPPED, SUNK, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, BLOCK_SIZE, QUANT,
                MIN_SPLIT, MAX_SPLITS, STEP,
            )  # fmt: skip
            taken += tl.num_programs(1)
        counted = end


@triton.jit
def _attend_split(
    q, kv_layer, scales, out, partial_out, partial_lse, cu_seqlens_q, seq_lens, block_tables,
    seq, split, max_splits, num_kv_heads, group,
    stride_qt, stride_qh, stride_block, stride_side, stride_head, stride_slot, stride_table,
    window, cap_factor, factor,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SUNK: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, QUANT: tl.constexpr,
    MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Attends one split of a seq, for the heads of this program's tile."""
    kv_head = tl.program_id(0) % num_kv_heads
    token = tl.load(cu_seqlens_q + seq)
    seq_len = tl.load(seq_lens + seq)
    begin, split_len, num_splits = _splits_of(seq_len, window, WINDOWED, MIN_SPLIT, MAX_SPLITS, STEP)
    rows = tl.program_id(0) // num_kv_heads * BLOCK_M + tl.arange(0, BLOCK_M)
    heads = kv_head * group + rows  # [M]
    valid = rows < group
    q_tile = load_tile(q + token.to(tl.int64) * stride_qt, heads * stride_qh, valid, True, HEAD_DIM, BLOCK_D)

    largest = tl.full([BLOCK_M], NOTHING_YET, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D // 2 if QUANT else BLOCK_D], tl.float32)
    odd = acc
    pool = kv_layer + tl.cast(kv_head, tl.int64) * stride_head
    pair_pool = (pool + stride_side).to(tl.pointer_type(tl.int16))  # for quantized KV
    pool_scales = scales + tl.cast(kv_head, tl.int64) * (stride_head // 4)
    table = block_tables + tl.cast(seq, tl.int64) * stride_table
    begin += split * split_len
    for first in range(begin, tl.minimum(begin + split_len, seq_len), BLOCK_N):
        keys_at = first + tl.arange(0, BLOCK_N)
        seen = keys_at < seq_len
        places = tl.minimum(keys_at, seq_len - 1)  # beyond the last key that one, so that no load is masked
        if WINDOWED:
            seen &= keys_at >= seq_len - window
        key_rows = pool_rows(table, places, stride_block, stride_slot, BLOCK_SIZE)
        keys = load_tile(pool, key_rows, seen, False, HEAD_DIM, BLOCK_D)
        key_scales = row_scales(pool_scales, table, places, stride_block, BLOCK_SIZE, QUANT)
        s = tl.where(seen[None, :], scores(q_tile, keys, key_scales, cap_factor, CAPPED, QUANT), UNSEEN)
        if QUANT:
            largest, total, acc, odd = _fold_pairs(
                s, pair_pool, pool_scales + stride_side // 4, table, places, stride_block, stride_slot,
                factor, largest, total, acc, odd, q_tile.dtype, HEAD_DIM, BLOCK_D, BLOCK_SIZE, QUANT,
            )  # fmt: skip
        else:
            values = load_tile(pool + stride_side, key_rows, seen, False, HEAD_DIM, BLOCK_D)
            largest, total, acc = fold(s, values, 0.0, factor, largest, total, acc, q_tile.dtype, QUANT)

    acc = averaged(total, tl.interleave(acc, odd) if QUANT else acc)
    columns = tl.arange(0, BLOCK_D)
    stored = valid[:, None] & (columns < HEAD_DIM)[None, :]
    num_heads = num_kv_heads * group
    if (num_splits == 1) & (not SUNK):
        out_rows = token.to(tl.int64) * num_heads + heads
        pointers = out + out_rows[:, None] * HEAD_DIM + columns[None, :]
        tl.store(pointers, acc.to(out.dtype.element_ty), mask=stored)
    else:
        partial_rows = (seq.to(tl.int64) * num_heads + heads) * max_splits + split
        tl.store(partial_out + partial_rows[:, None] * HEAD_DIM + columns[None, :], acc, mask=stored)
        tl.store(partial_lse + partial_rows, largest + tl.log2(total), mask=valid)


@triton.jit
def _fold_pairs(
    s, pool, scales, table, places, stride_block, stride_slot, factor, largest, total, even, odd,
    dtype: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    """Folds quantized values two at a time, as int16, with a sum `[M, D / 2]` for each of the two; see `fold`. A
    product wants values transposed; the matrix units' loads do that for 16 bits, and for no less.
    """
    rows = pool_rows(table, places, stride_block // 2, stride_slot // 2, BLOCK_SIZE)
    pairs = load_tile(pool, rows, places, False, HEAD_DIM // 2, BLOCK_D // 2)
    value_scales = row_scales(scales, table, places, stride_block, BLOCK_SIZE, QUANT)
    weights, shrink, largest, total = weigh(s, value_scales, factor, largest, total, dtype, QUANT)
    low, high = widened(pairs.to(tl.int8), dtype, QUANT), widened((pairs >> 8).to(tl.int8), dtype, QUANT)
    even = tl.dot(weights, low, even * shrink[:, None], input_precision=EXACT)
    odd = tl.dot(weights, high, odd * shrink[:, None], input_precision=EXACT)
    return largest, total, even, odd


@triton.jit(do_not_specialize=["max_splits"], do_not_specialize_on_alignment=INDEX_TENSORS)
def merge_kernel(
    partial_out, partial_lse, sinks, out, cu_seqlens_q, seq_lens, max_splits, num_heads, window,
    WINDOWED: tl.constexpr, SUNK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Grid `[B, H]`: adds the splits of one head of one seq, each weighted by its share of the softmax's sum.

    A sink (SUNK) is one more of them, whose value is zero: then single splits come here too.
    """
    seq = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(cu_seqlens_q + seq)
    _, _, num_splits = _splits_of(tl.load(seq_lens + seq), window, WINDOWED, MIN_SPLIT, MAX_SPLITS, STEP)
    if tl.load(cu_seqlens_q + seq + 1) - token != 1 or (num_splits == 1 and not SUNK):
        return
    splits = tl.arange(0, MAX_SPLITS)
    used = splits < num_splits
    columns = tl.arange(0, BLOCK_D)
    rows = (seq.to(tl.int64) * num_heads + head) * max_splits + splits
    lse = tl.load(partial_lse + rows, mask=used, other=NOTHING_YET)
    largest = tl.max(lse, 0)
    weights = tl.exp2(lse - largest)
    weights = weights / with_sink(tl.sum(weights, 0), largest, sinks + head, SUNK)
    parts = load_tile(partial_out, rows * HEAD_DIM, used, True, HEAD_DIM, BLOCK_D)
    merged = tl.sum(weights[:, None] * parts, 0)
    out_row = token.to(tl.int64) * num_heads + head
    tl.store(out + out_row * HEAD_DIM + columns, merged.to(out.dtype.element_ty), mask=columns < HEAD_DIM)


def max_splits_for(max_seq_len: int, sliding_window: int | None) -> int:
    """Most splits that a seq of up to `max_seq_len` tokens can have."""
    seen = max_seq_len if sliding_window is None else min(max_seq_len, sliding_window + _SPLIT_STEP - 1)
    return min(MAX_SPLITS, max(1, -(-seen // MIN_SPLIT)))


@cache
def _num_multiprocessors(device: torch.device) -> int:
    """1 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def num_programs(device: torch.device, num_tiles: int, most_splits: int) -> int:
    """P: how many programs share the splits of each of `num_tiles` tiles of heads; `most_splits` is a bound."""
    wanted = _PROGRAMS_PER_MULTIPROCESSOR * _num_multiprocessors(device)
    return min(most_splits, -(-wanted // num_tiles))


def decode(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
    out: torch.Tensor,
) -> None:
    """Attends for every seq that computes one token; writes their rows of `out` `[T, H, D]`, contiguous.

    Of the lengths on the host only the longest matters, as a bound: a graph captured with it may be
    replayed with any shorter ones on the device. Arguments are checked by the caller.
    """
    _, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_layer.shape[2:4]
    num_seqs = len(metadata.query_lens_host)
    group = num_heads // num_kv_heads
    config = attention_config("decode", head_dim, q.dtype, arch_of(q.device))
    max_splits = max_splits_for(metadata.max_seq_len, params.sliding_window)
    sunk = params.sinks is not None
    merged = max_splits > 1 or sunk
    workspace = (num_seqs, num_heads, max_splits) if merged else (0, 0, 0)
    partial_out = torch.empty((*workspace, head_dim), dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(workspace, dtype=torch.float32, device=q.device)
    windowed, window = params.sliding_window is not None, params.sliding_window or 0
    cap_factor, factor = score_factors(params)
    num_tiles = num_kv_heads * -(-group // config.block_m)
    decode_kernel[(num_tiles, num_programs(q.device, num_tiles, num_seqs * max_splits))](
        q, *pool_arguments(kv_layer), out, partial_out, partial_lse,
        metadata.cu_seqlens_q, metadata.seq_lens, metadata.block_tables,
        num_seqs, max_splits, num_kv_heads, group,
        q.stride(0), q.stride(1), *kv_layer.stride()[:4], metadata.block_tables.stride(0),
        window, cap_factor, factor,
        **constants(
            config, head_dim, block_size, windowed=windowed, capped=params.soft_cap is not None,
            sunk=sunk, quant=QUANT.get(kv_layer.dtype, 0),
        ),
        COUNTED=_COUNTED, **_SPLITTING,
        **launch_options(config.num_warps, config.num_stages),
    )  # fmt: skip
    if merged:
        merge_kernel[(num_seqs, num_heads)](
            partial_out, partial_lse, params.sinks if sunk else partial_lse, out,
            metadata.cu_seqlens_q, metadata.seq_lens, max_splits, num_heads, window,
            WINDOWED=windowed, SUNK=sunk, HEAD_DIM=head_dim, BLOCK_D=padded_head_dim(head_dim),
            **_SPLITTING, **launch_options(_MERGE_WARPS),
        )  # fmt: skip


def compile_variants(arch: int) -> Iterator[Variant]:
    """Every head_dim and dtype with its shipped tiles; masks and other block sizes where they are common."""

    def variant(head_dim: int, dtype: torch.dtype = torch.bfloat16, **kind: Any) -> Variant:
        kind |= {"COUNTED": _COUNTED, **_SPLITTING}
        return attention_variant(decode_kernel, "decode", arch, head_dim, dtype, **kind)

    for head_dim in (64, 80, 96, 128, 256):
        yield from (variant(head_dim, dtype) for dtype in POINTERS)
    for head_dim, block_size in ((128, 1), (256, 256)):
        yield variant(head_dim, block_size=block_size, has_edges=True)
    yield variant(64, has_edges=True, sunk=True)
    yield from (variant(128, quant=quant) for quant in QUANT.values())
    for head_dim in (64, 80, 128, 256):
        yield _merge_variant(head_dim, sunk=False)
    yield _merge_variant(64, sunk=True)


def _merge_variant(head_dim: int, *, sunk: bool) -> Variant:
    return Variant(
        kernel=merge_kernel,
        signature={
            **dict.fromkeys(("partial_out", "partial_lse", "sinks"), "*fp32"),
            "out": "*bf16",
            **dict.fromkeys(("cu_seqlens_q", "seq_lens"), "*i32"),
        },
        constexprs={
            "WINDOWED": True,
            "SUNK": sunk,
            "HEAD_DIM": head_dim,
            "BLOCK_D": padded_head_dim(head_dim),
            **_SPLITTING,
        },
        num_warps=_MERGE_WARPS,
        label=f"decode merge D={head_dim}{' sunk' if sunk else ''}",
    )
