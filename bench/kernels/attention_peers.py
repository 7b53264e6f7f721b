"""Attention that others ship, as calls on the same batch: torch's back-ends and flash-attn.

Torch gets keys and values that already lie contiguously, seq by seq, which flatters it: a served
step would have to gather them from blocks first.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from bench.kernels.attention_batch import AttentionBatch, rows_of
from bench.support.timing import Call

CUDA_SDPA = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
}
_FLASH_BLOCK = 256
"""flash-attn 2 takes block tables only for multiples of this."""


def peer_calls(batch: AttentionBatch) -> Iterator[tuple[str, list[Call]]]:
    """Every peer that can be tried on the batch's device, by name; a call may still raise RuntimeError."""
    if batch.metadata.seq_lens.device.type == "cpu":
        yield "torch sdpa", _sdpa_calls(batch)
        return
    for name, backend in CUDA_SDPA.items():
        # Torch computes a chunk's mask, which is aligned to the bottom right, with flash whatever is asked for.
        if batch.shape.is_decode or batch.shape.is_fresh or backend is SDPBackend.FLASH_ATTENTION:
            yield name, [partial(_with_backend, backend, call) for call in _sdpa_calls(batch)]
    if importlib.util.find_spec("flash_attn") is not None:
        yield "flash-attn", [_flash_attn_call(batch)]


def _with_backend(backend: SDPBackend, call: Call) -> object:
    with sdpa_kernel(backend):
        return call()


def _sdpa_calls(batch: AttentionBatch) -> list[Call]:
    """Seqs of one shape share a call, others go one by one; a layer each."""
    uniform = len(set(batch.shape.lens)) == 1
    return [_sdpa_together(batch, layer) if uniform else _sdpa_apart(batch, layer) for layer in range(batch.num_layers)]


def _sdpa_together(batch: AttentionBatch, layer: int) -> Call:
    query_len, seq_len = batch.shape.lens[0]
    keys, values = (torch.stack(side) for side in zip(*batch.dense(layer), strict=True))  # [B, Hkv, K, D]
    queries = batch.queries()
    q = queries.reshape(-1, query_len, *queries.shape[1:]).transpose(1, 2).contiguous()  # [B, H, Q, D]
    attend = _masked(query_len, seq_len, q.device)
    return lambda: attend(q, keys, values).transpose(1, 2).flatten(0, 1)


def _sdpa_apart(batch: AttentionBatch, layer: int) -> Call:
    ragged = torch.split(batch.queries(), [query_len for query_len, _ in batch.shape.lens])
    queries = [each.transpose(0, 1)[None].contiguous() for each in ragged]  # [1, H, Q, D] each
    dense = [(keys[None], values[None]) for keys, values in batch.dense(layer)]
    attends = [_masked(*lens, queries[0].device) for lens in batch.shape.lens]

    def call() -> torch.Tensor:
        return rows_of([attend(q, *kv)[0] for attend, q, kv in zip(attends, queries, dense, strict=True)])

    return call


def _masked(query_len: int, seq_len: int, device: torch.device) -> Callable[..., torch.Tensor]:
    """SDPA with the causal mask that `(query_len, seq_len)` needs, said in the cheapest way."""
    if query_len == 1:
        return partial(scaled_dot_product_attention, enable_gqa=True)
    if query_len == seq_len:
        return partial(scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    if device.type == "cuda":
        return partial(scaled_dot_product_attention, attn_mask=causal_lower_right(query_len, seq_len), enable_gqa=True)
    mask = torch.ones(query_len, seq_len, dtype=torch.bool, device=device).tril(seq_len - query_len)
    return partial(scaled_dot_product_attention, attn_mask=mask, enable_gqa=True)


def _flash_attn_call(batch: AttentionBatch) -> Call:
    """Over the paged pool where its block rule allows, else over dense keys and values."""
    flash_attn: Any = importlib.import_module("flash_attn")
    metadata, shape, q = batch.metadata, batch.shape, batch.queries()
    cache = partial(flash_attn.flash_attn_with_kvcache, q[:, None], cache_seqlens=metadata.seq_lens, causal=True)
    if shape.is_decode and shape.block_size % _FLASH_BLOCK == 0:
        keys, values = (side.transpose(1, 2).contiguous() for side in batch.kv_layer.unbind(1))  # [N, S, Hkv, D]
        return lambda: cache(keys, values, block_table=metadata.block_tables)[:, 0]
    dense = batch.dense(0)
    if shape.is_decode:
        keys, values = (torch.stack(side).transpose(1, 2).contiguous() for side in zip(*dense, strict=True))
        return lambda: cache(keys, values)[:, 0]  # over [B, K, Hkv, D]
    keys, values = (rows_of(side) for side in zip(*dense, strict=True))  # [sum of seq_len, Hkv, D]
    cu_seqlens_k = torch.nn.functional.pad(metadata.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
    bounds = metadata.cu_seqlens_q, cu_seqlens_k, metadata.max_query_len, metadata.max_seq_len
    return lambda: flash_attn.flash_attn_varlen_func(q, keys, values, *bounds, causal=True)
