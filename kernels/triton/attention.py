"""The `triton` back-end's attention: seqs of one token by the decode kernel, prompts and chunks by the prefill kernel.

A step that mixes both runs both kernels over the same batch; each passes over what is the
other's. So a seq is computed in the same way whoever shares its step.

Tests: tests/kernels/test_triton_attention.py, against attention written out in float64.
"""

from __future__ import annotations

import torch

from kernels.attention import AttentionMetadata, AttentionParams
from kernels.spec import check_attend
from kernels.triton.decode import decode
from kernels.triton.prefill import prefill


class TritonAttention:
    """Implements `kernels.attention.AttentionBackend`."""

    name = "triton"

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_layer: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`. Never synchronizes, so that it can be captured in a graph."""
        dims = check_attend(q, kv_layer, metadata, params)
        dims.check("k", k, ("T", "Hkv", "D"), q.dtype, q.device)
        dims.check("v", v, ("T", "Hkv", "D"), q.dtype, q.device)
        make = torch.zeros if metadata.is_padded else torch.empty  # what nobody writes must not reach experts as NaN
        out = make(q.shape, dtype=q.dtype, device=q.device)  # [T, H, D]
        if 1 in metadata.query_lens_host:
            decode(q, kv_layer, metadata, params, out)
        if metadata.max_query_len > 1:
            prefill(q, k, v, kv_layer, metadata, params, out)
        return out
