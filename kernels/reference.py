"""The `reference` back-end: attention in plain torch on any device. Correct first; the oracle of the others.

Seqs that compute one token share one batched call over gathered, padded blocks; chunks and
prompts go one by one. Knows nothing of schedules: a step may mix both freely.

Tests: tests/kernels/test_reference.py compares it with attention written out in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention import AttentionMetadata, AttentionParams
from kernels.quantized_kv import is_quantized, read_blocks
from kernels.spec import check_attend

_MAX_PADDING = 1.25
_SHORT_TOKENS = 64
"""Up to here padding costs less than another call."""


class ReferenceBackend:
    """Implements `kernels.attention.AttentionBackend`; float64 too, so that it can be its own oracle."""

    name = "reference"

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_layer: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`. q `[T, H, D]` → `[T, H, D]`; nothing is mutated."""
        check_attend(q, kv_layer, metadata, params)
        singles = tuple(i for i, query_len in enumerate(metadata.query_lens_host) if query_len == 1)
        groups = _of_like_length(singles, metadata.seq_lens_host)
        if groups and len(groups[0]) == len(metadata.query_lens_host):
            return _attend_singles(q, kv_layer, metadata, tuple(range(len(q))), params)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        starts = tuple(accumulate(metadata.query_lens_host, initial=0))
        for group in groups:
            rows = torch.tensor([starts[i] for i in group], device=q.device)  # [B1]
            out[rows] = _attend_singles(q[rows], kv_layer, metadata, group, params)
        for i, query_len in enumerate(metadata.query_lens_host):
            span = slice(starts[i], starts[i] + query_len)
            if query_len > 1 and metadata.seq_lens_host[i] == query_len and not is_quantized(kv_layer):
                out[span] = _attend_chunk(q[span], k[span].transpose(0, 1), v[span].transpose(0, 1), params)
            elif query_len > 1:
                keys, values = _gather_seq(kv_layer, metadata.block_tables[i], metadata.seq_lens_host[i], q.dtype)
                out[span] = _attend_chunk(q[span], keys, values, params)
        return out


def _of_like_length(seqs: Sequence[int], lens: Sequence[int]) -> list[tuple[int, ...]]:
    """Splits seqs into groups to be padded to their longest, which is at most `_MAX_PADDING` times their shortest."""
    groups: list[list[int]] = []
    for i in sorted(seqs, key=lens.__getitem__):
        if not groups or lens[i] > max(_MAX_PADDING * lens[groups[-1][0]], _SHORT_TOKENS):
            groups.append([])
        groups[-1].append(i)
    return [tuple(group) for group in groups]


def _attend_singles(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    metadata: AttentionMetadata,
    seqs: tuple[int, ...],
    params: AttentionParams,
) -> torch.Tensor:
    """One token of each of the seqs numbered `seqs`: q `[B, H, D]` → `[B, H, D]`."""
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_layer.shape[2:4]
    whole_batch = len(seqs) == len(metadata.seq_lens_host)
    lens_host = [metadata.seq_lens_host[i] for i in seqs]
    max_blocks = -(-max(lens_host) // block_size)
    index = None if whole_batch else torch.tensor(seqs, device=q.device)
    tables = metadata.block_tables if index is None else metadata.block_tables[index]
    lens = metadata.seq_lens if index is None else metadata.seq_lens[index]
    tables = tables[:, :max_blocks].clamp(min=0)  # padding reads block 0; its slots are cleared below

    kv = read_blocks(kv_layer, tables.reshape(-1), q.dtype)  # [B * M, 2, Hkv, S, D]
    kv = kv.view(num_seqs, max_blocks, 2, num_kv_heads, block_size, head_dim).permute(2, 0, 3, 1, 4, 5)
    kv = kv.reshape(2, num_seqs, num_kv_heads, max_blocks * block_size, head_dim)
    for i, seq_len in enumerate(lens_host):
        # A slot never written may hold NaN, which a mask does not stop: 0 * NaN is NaN.
        kv[:, i, :, seq_len:].zero_()

    positions = torch.arange(max_blocks * block_size, device=q.device)  # [M * S]
    visible = positions < lens[:, None]  # [B, M * S]
    if params.sliding_window is not None:
        visible &= positions >= lens[:, None] - params.sliding_window
    # The query heads of one KV head stand where queries do: no KV is repeated.
    grouped = q.reshape(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)  # [B, Hkv, G, D]
    sinks = None if params.sinks is None else params.sinks.view(num_kv_heads, -1)  # [Hkv, G]
    out = _softmax_attention(grouped, kv[0], kv[1], visible[:, None, None], params, sinks)
    return out.reshape(num_seqs, num_heads, head_dim)


def _gather_seq(
    kv_layer: torch.Tensor, block_table: torch.Tensor, seq_len: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one seq from its blocks, each `[Hkv, seq_len, D]` of `dtype`."""
    num_kv_heads, block_size, head_dim = kv_layer.shape[2:]
    num_blocks = -(-seq_len // block_size)
    kv = read_blocks(kv_layer, block_table[:num_blocks], dtype).permute(1, 2, 0, 3, 4)  # [2, Hkv, M, S, D]
    kv = kv.reshape(2, num_kv_heads, num_blocks * block_size, head_dim)[:, :, :seq_len]
    return kv[0], kv[1]


def _attend_chunk(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams) -> torch.Tensor:
    """One seq's chunk: q `[Q, H, D]` over keys, values `[Hkv, K, D]` → `[Q, H, D]`; q is the last Q of the K."""
    query_len, seq_len = q.shape[0], keys.shape[1]
    mask = None
    is_plain = params.soft_cap is None and params.sinks is None
    if seq_len > query_len or not is_plain or (params.sliding_window or seq_len) < seq_len:
        mask = _causal_mask(query_len, seq_len, params.sliding_window, q.device)
    sinks = None if params.sinks is None else params.sinks[:, None]  # [H, 1]
    out = _softmax_attention(q.transpose(0, 1)[None], keys[None], values[None], mask, params, sinks)  # [1, H, Q, D]
    return out[0].transpose(0, 1)


def _softmax_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    params: AttentionParams,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Q `[B, H, Q, D]` over `[B, Hkv, K, D]`; `mask` is true where a query sees a key, None = causal, Q = K.

    `sinks`: of each head `[H, 1]`, or of each query too `[H, Q]`.
    """
    grouped = q.shape[1] != keys.shape[1]
    if params.soft_cap is None and sinks is None:
        return scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, is_causal=mask is None, scale=params.scale, enable_gqa=grouped
        )
    if grouped:
        keys, values = (side.repeat_interleave(q.shape[1] // side.shape[1], 1) for side in (keys, values))
    scores = q @ keys.mT
    if params.soft_cap is None:
        scores = scores * params.scale
    else:
        scores = torch.tanh(scores * (params.scale / params.soft_cap)) * params.soft_cap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:  # one more key, whose value is zero
        column = sinks.to(scores.dtype)[..., None].expand(*scores.shape[:-1], 1)
        return torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1] @ values
    return scores.softmax(-1) @ values


def _causal_mask(query_len: int, seq_len: int, sliding_window: int | None, device: torch.device) -> torch.Tensor:
    """True where query i (at position `seq_len - query_len + i`) sees key j: `[query_len, seq_len]`."""
    query_positions = torch.arange(seq_len - query_len, seq_len, device=device)[:, None]
    key_positions = torch.arange(seq_len, device=device)
    mask = key_positions <= query_positions
    if sliding_window is not None:
        mask &= key_positions > query_positions - sliding_window
    return mask
