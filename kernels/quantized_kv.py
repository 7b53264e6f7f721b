"""KV stored with scales: how elements and scales lie in the pool, and how a row is rounded when it is stored.

A layer of the pool stays `[N, 2, Hkv, S, D]`, of int8 or e4m3; the scales are read from behind each head's `[S, D]`.
Every kernel set rounds by the same formula, so the same row is stored as the same bytes by all of them.
"""

from __future__ import annotations

import torch

from tandem.kv_layout import SCALE_BYTES

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""By element type: the number that stores a row's largest magnitude."""
SMALLEST_ROW = 1e-30
"""A row without a larger magnitude is stored as if it had this one, so that no scale is zero."""


def is_quantized(kv_layer: torch.Tensor) -> bool:
    """Whether its elements have scales."""
    return kv_layer.dtype in LARGEST


def kv_scales(kv_layer: torch.Tensor) -> torch.Tensor:
    """Scales `[N, 2, Hkv, S]` float32 of a quantized layer `[N, 2, Hkv, S, D]`; a view of the same pool."""
    block_size, head_dim = kv_layer.shape[3:]
    shape = (*kv_layer.shape[:3], block_size * SCALE_BYTES)
    begin = kv_layer.storage_offset() + block_size * head_dim
    return kv_layer.as_strided(shape, (*kv_layer.stride()[:3], 1), begin).view(torch.float32)


def quantize_rows(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[..., D]` → elements `[..., D]` of `dtype` and scales `[...]` float32; a row that holds NaN stays NaN."""
    wide = rows.to(torch.float32)
    largest = wide.abs().amax(-1, keepdim=True).clamp_(min=SMALLEST_ROW)
    top = torch.full_like(largest, LARGEST[dtype])  # torch would multiply by the inverse of a number: off by a bit
    scaled = wide * (top / largest)
    values = scaled.round_() if dtype == torch.int8 else scaled
    return values.to(dtype), (largest / top).squeeze(-1)


def read_blocks(kv_layer: torch.Tensor, block_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Blocks `[M, 2, Hkv, S, D]` of a layer, as `dtype`; quantized ones are multiplied by their scales."""
    if not is_quantized(kv_layer):
        return kv_layer.index_select(0, block_ids)
    stored = kv_layer.view(torch.int8).index_select(0, block_ids).view(kv_layer.dtype)  # torch moves no e4m3
    scales = kv_scales(kv_layer).index_select(0, block_ids)
    wide = torch.promote_types(dtype, torch.float32)
    return stored.to(wide).mul_(scales[..., None]).to(dtype)
