"""q/k norm, rotary embedding (arXiv 2104.09864) and KV store by slot, in one launch.

A program owns some neighbouring heads of one token, whatever they are: heads of q and k are
normed and turned in place, heads of k and v stored. Computed in float32 and rounded once: an
element is within one rounding of its dtype, plus D * 2^-24 relative to its head's largest, of
the exact result.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.operations import QkNorm, Rotation
from kernels.quantized_kv import LARGEST, SMALLEST_ROW
from kernels.spec import check_float, check_rotate_and_store
from kernels.triton.tile import QUANT, QUANT_LABELS, pool_arguments
from kernels.triton.variant import POINTERS, Variant, launch_options

_TILE_PAIRS = 512
_NUM_WARPS = 4


def rotate_and_store(qkv: torch.Tensor, rotation: Rotation, qk_norm: QkNorm | None, kv_layer: torch.Tensor) -> None:
    """See `Operations.rotate_and_store`; `qkv` and the angles may have any strides over their first dimensions.

    Two tokens must not have the same slot, and no slot may lie beyond the pool: neither is looked for.
    """
    check_float("qkv", qkv)
    dims = check_rotate_and_store(qkv, rotation, qk_norm, kv_layer)
    num_tokens, num_heads, half = dims["T"], dims["H+2Hkv"], dims["D/2"]
    if not num_tokens:
        return
    pairs, heads = _tile(half, num_heads)
    _rotate_and_store[(num_tokens, triton.cdiv(num_heads, heads))](
        *(qkv, rotation.cos, rotation.sin),
        qkv if qk_norm is None else qk_norm.q_weight,
        qkv if qk_norm is None else qk_norm.k_weight,
        *(*pool_arguments(kv_layer), rotation.slot_mapping),
        *(qkv.stride(0), qkv.stride(1), rotation.cos.stride(0), rotation.sin.stride(0)),
        *kv_layer.stride()[:4],
        *(dims["S"], num_heads, dims["Hkv"]),
        0.0 if qk_norm is None else qk_norm.eps,
        HALF=half,
        PAIRS=pairs,
        HEADS=heads,
        HAS_NORM=qk_norm is not None,
        QUANT=QUANT.get(kv_layer.dtype, 0),
        **launch_options(_NUM_WARPS),
    )


def compile_variants(arch: int) -> Iterator[Variant]:
    """Head sizes with and without padding, with and without norm; alike on every `arch`."""
    for dtype, head_dim, has_norm, quant in (
        (torch.bfloat16, 64, False, 0),
        (torch.bfloat16, 80, False, 0),
        (torch.bfloat16, 128, True, 0),
        (torch.bfloat16, 256, True, 0),
        (torch.float32, 128, True, 0),
        (torch.bfloat16, 128, True, 1),
        (torch.bfloat16, 128, False, 2),
    ):
        pool = (
            {"kv_layer": "*i8", "scales": "*fp32"} if quant else dict.fromkeys(("kv_layer", "scales"), POINTERS[dtype])
        )
        pairs, heads = _tile(head_dim // 2, 48)
        kv_strides = ("block_stride", "side_stride", "kv_head_stride", "slot_stride")
        yield Variant(
            kernel=_rotate_and_store,
            signature={
                **dict.fromkeys(("qkv", "q_weight", "k_weight"), POINTERS[dtype]),
                **pool,
                **dict.fromkeys(("cos", "sin"), "*fp32"),
                "slot_mapping": "*i64",
                "eps": "fp32",
            },
            constexprs={"HALF": head_dim // 2, "PAIRS": pairs, "HEADS": heads, "HAS_NORM": has_norm, "QUANT": quant},
            num_warps=_NUM_WARPS,
            label=f"rotate_and_store {POINTERS[dtype][1:]} D={head_dim}{' norm' * has_norm}{QUANT_LABELS[quant]}",
            aligned=frozenset(("qkv_stride", "head_stride", *kv_strides)),
        )


def _tile(half: int, num_heads: int) -> tuple[int, int]:
    """Pairs of elements (padded) and heads of a program."""
    pairs: int = triton.next_power_of_2(half)
    return pairs, min(triton.next_power_of_2(num_heads), max(1, _TILE_PAIRS // pairs))


LARGEST_INT8, LARGEST_FP8 = tl.constexpr(LARGEST[torch.int8]), tl.constexpr(LARGEST[torch.float8_e4m3fn])
_SMALLEST_ROW = tl.constexpr(SMALLEST_ROW)


@triton.jit
def _largest(x, y):
    """Largest magnitude of each row of x, y `[HEADS, PAIRS]`; compared as integers, where NaN is the largest."""
    row_x = tl.max(x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    row_y = tl.max(y.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    smallest = tl.full(row_x.shape, _SMALLEST_ROW, tl.float32).to(tl.int32, bitcast=True)
    return tl.maximum(tl.maximum(row_x, row_y), smallest).to(tl.float32, bitcast=True)


@triton.jit
def _narrowed(x, QUANT: tl.constexpr):
    """Float32 as bytes of int8 or e4m3, to nearest, ties to even; |x| < 464."""
    if QUANT == 1:
        return _rounded(x).to(tl.int8)
    else:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        denormal = _rounded(tl.abs(x) * 512.0)
        code = tl.where(magnitude < (121 << 23), denormal, normal)
        return (code | ((bits >> 24) & 0x80)).to(tl.int8)


@triton.jit
def _rounded(x):
    """To the nearest integer, |x| < 2 ** 22: adding 1.5 * 2 ** 23 leaves it in the lowest bits."""
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _rotate_and_store(
    qkv, cos, sin, q_weight, k_weight, kv_layer, scales, slot_mapping, qkv_stride, head_stride, cos_stride, sin_stride,
    block_stride, side_stride, kv_head_stride, slot_stride, block_size, num_heads, num_kv_heads, eps,
    HALF: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr, HAS_NORM: tl.constexpr,
    QUANT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)  # [HEADS] of q, then k, then v
    pair = tl.arange(0, PAIRS)
    dtype: tl.constexpr = qkv.dtype.element_ty
    first_k = num_heads - 2 * num_kv_heads
    first_v = num_heads - num_kv_heads

    inside = (head < num_heads)[:, None] & (pair < HALF)[None, :]  # [HEADS, PAIRS]
    lower = qkv + token * qkv_stride + head[:, None] * head_stride + pair[None, :]
    x = tl.load(lower, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(lower + HALF, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + token * cos_stride + pair, mask=pair < HALF, other=0.0)[None, :]
    s = tl.load(sin + token * sin_stride + pair, mask=pair < HALF, other=0.0)[None, :]
    normed_x, normed_y = x, y
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / (2 * HALF) + eps)[:, None]  # [HEADS, 1]
        weight = tl.where((head < first_k)[:, None], q_weight, k_weight) + pair[None, :]
        normed_x = x * scale * tl.load(weight, mask=inside, other=0.0).to(tl.float32)
        normed_y = y * scale * tl.load(weight + HALF, mask=inside, other=0.0).to(tl.float32)
    turns = (head < first_v)[:, None]
    x = tl.where(turns, normed_x * c - normed_y * s, x).to(dtype)
    y = tl.where(turns, normed_y * c + normed_x * s, y).to(dtype)
    tl.store(lower, x, mask=inside & turns)
    tl.store(lower + HALF, y, mask=inside & turns)

    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        is_v = (head >= first_v).to(tl.int32)
        kv_head = head - first_k - is_v * num_kv_heads  # [HEADS]
        where = kv_layer + (slot // block_size) * block_stride + (slot % block_size) * slot_stride
        stored = where + (is_v * side_stride + kv_head * kv_head_stride)[:, None] + pair[None, :]
        is_kv = (head >= first_k)[:, None]
        if QUANT:
            largest = _largest(x, y)  # [HEADS]
            top = tl.full([HEADS], LARGEST_INT8 if QUANT == 1 else LARGEST_FP8, tl.float32)
            factor = tl.div_rn(top, largest)[:, None]
            # Between product and sum, which would else become one operation of another rounding.
            low = _narrowed(tl.minimum(x.to(tl.float32) * factor, top[:, None]), QUANT)
            high = _narrowed(tl.minimum(y.to(tl.float32) * factor, top[:, None]), QUANT)
            heads_scales = scales + slot // block_size * (block_stride // 4) + slot % block_size
            at = heads_scales + (is_v * (side_stride // 4) + kv_head * (kv_head_stride // 4))
            tl.store(at, tl.div_rn(largest, top), mask=(head >= first_k) & (head < num_heads))
            tl.store(stored, low, mask=inside & is_kv)
            tl.store(stored + HALF, high, mask=inside & is_kv)
        else:
            tl.store(stored, x, mask=inside & is_kv)
            tl.store(stored + HALF, y, mask=inside & is_kv)
