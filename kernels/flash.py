"""The `flash_attn` back-end: FlashAttention-2's own kernels where the package is installed, Triton's for the rest.

Source: Dao, FlashAttention-2 (arXiv 2307.08691). A batch is cut into runs of neighbouring seqs:

    FRESH   all keys are this step's own: read from the ragged k and v, no block table at all
    PAGED   the others, decode steps too: from the pool

Stock flash-attn 2 takes blocks of 256 tokens and their multiples only ("Paged KV cache block
size must be divisible by 256"), heads of up to 256 elements, and pads those that are no multiple
of 8, which would copy the pool. What it does not take goes to the other back-end.

torch has a copy of the same kernels (`torch.nn.attention.varlen`) without soft cap; it is not
used, since Triton's kernels stand there already and nothing shows that it would beat them.

Tests: tests/kernels/test_flash.py.
"""

from __future__ import annotations

import enum
import importlib
import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import Any, Protocol

import torch

from kernels import triton
from kernels.attention import AttentionBackend, AttentionMetadata, AttentionParams
from kernels.operations import Kernels
from kernels.quantized_kv import is_quantized
from kernels.spec import check_attend

PAGE_MULTIPLE = 256
"""Block sizes that flash-attn's block tables take."""
MAX_HEAD_DIM, HEAD_DIM_MULTIPLE = 256, 8
MIN_FRESH_TOKENS = 256
"""A shorter fresh run beside paged ones joins them: one launch less per layer. Chosen, not measured."""
_DTYPES = (torch.bfloat16, torch.float16)
_MIN_VERSION, _END_VERSION = (2, 6), (3,)
"""2.6 brought the soft cap; 3 is another interface."""


class Source(enum.Enum):
    """Where a run's keys are read from."""

    FRESH = enum.auto()
    PAGED = enum.auto()


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring seqs `first … end - 1` of a batch whose keys come from one source."""

    source: Source
    first: int
    end: int


class FlashLibrary(Protocol):
    """What is called of the package flash_attn."""

    def flash_attn_varlen_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        **options: Any,
    ) -> torch.Tensor:
        """Ragged q `[T, H, D]` over ragged or paged keys."""

    def flash_attn_with_kvcache(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """Q `[B, Q, H, D]` over paged keys, split among more cores than B."""


def plan_runs(query_lens: Sequence[int], seq_lens: Sequence[int], min_fresh_tokens: int) -> list[Run]:
    """Cuts a batch into runs, in order; a pure decode step is one PAGED run, whatever its lengths."""
    if max(query_lens) <= 1:
        return [Run(Source.PAGED, 0, len(query_lens))]
    sources = [Source.FRESH if q == n else Source.PAGED for q, n in zip(query_lens, seq_lens, strict=True)]
    if Source.PAGED in sources:
        for run in _runs(sources):
            if run.source is Source.FRESH and sum(query_lens[run.first : run.end]) < min_fresh_tokens:
                sources[run.first : run.end] = [Source.PAGED] * (run.end - run.first)
    return list(_runs(sources))


def _runs(sources: Sequence[Source]) -> list[Run]:
    lengths = [(source, len(list(group))) for source, group in groupby(sources)]
    bounds = accumulate((length for _, length in lengths), initial=0)
    return [Run(source, *bound) for (source, _), bound in zip(lengths, pairwise(bounds), strict=True)]


@dataclass(frozen=True, slots=True)
class FlashAttention:
    """Implements `kernels.attention.AttentionBackend`; `other` computes what `library` does not take."""

    library: FlashLibrary
    other: AttentionBackend
    name = "flash_attn"

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_layer: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        dims = check_attend(q, kv_layer, metadata)
        if dims["D"] > MAX_HEAD_DIM or dims["D"] % HEAD_DIM_MULTIPLE or is_quantized(kv_layer):
            return self.other.attend(q, k, v, kv_layer, metadata, params)
        runs = plan_runs(metadata.query_lens_host, metadata.seq_lens_host, MIN_FRESH_TOKENS)
        if len(runs) == 1:
            return self._attend_run(runs[0].source, q, k, v, kv_layer, metadata, params)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        starts = list(accumulate(metadata.query_lens_host, initial=0))
        for run in runs:
            rows = slice(starts[run.first], starts[run.end])
            part = _part(metadata, run, rows)
            out[rows] = self._attend_run(run.source, q[rows], k[rows], v[rows], kv_layer, part, params)
        return out

    def _attend_run(
        self,
        source: Source,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_layer: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        if source is Source.FRESH:
            cu_seqlens, longest = metadata.cu_seqlens_q, metadata.max_query_len
            return self.library.flash_attn_varlen_func(
                q, k, v, cu_seqlens, cu_seqlens, longest, longest, **_options(params)
            )
        if kv_layer.shape[3] % PAGE_MULTIPLE:
            return self.other.attend(q, k, v, kv_layer, metadata, params)
        keys, values = kv_layer.transpose(2, 3).unbind(1)  # [N, S, Hkv, D] each, views of the pool
        if metadata.max_query_len == 1 and len(q) == len(metadata.query_lens_host):
            return self.library.flash_attn_with_kvcache(
                q[:, None],  # [B, 1, H, D]
                keys,
                values,
                cache_seqlens=metadata.seq_lens,
                block_table=metadata.block_tables,
                **_options(params),
            )[:, 0]
        cu_seqlens_k = torch.zeros_like(metadata.cu_seqlens_q)  # [B + 1]
        torch.cumsum(metadata.seq_lens, 0, dtype=torch.int32, out=cu_seqlens_k[1:])
        return self.library.flash_attn_varlen_func(
            q,
            keys,
            values,
            metadata.cu_seqlens_q,
            cu_seqlens_k,
            metadata.max_query_len,
            metadata.max_seq_len,
            block_table=metadata.block_tables,
            **_options(params),
        )


def _part(metadata: AttentionMetadata, run: Run, rows: slice) -> AttentionMetadata:
    """What attention must know of one run; nothing is copied from the host."""
    seqs = slice(run.first, run.end)
    bounds = metadata.cu_seqlens_q[run.first : run.end + 1]
    return AttentionMetadata(
        cu_seqlens_q=bounds - bounds[:1],
        seq_lens=metadata.seq_lens[seqs],
        block_tables=metadata.block_tables[seqs],
        slot_mapping=metadata.slot_mapping[rows],
        query_lens_host=metadata.query_lens_host[seqs],
        seq_lens_host=metadata.seq_lens_host[seqs],
    )


def _options(params: AttentionParams) -> dict[str, Any]:
    """As flash-attn calls them; its window counts the positions before the query's own, -1 = all."""
    before = -1 if params.sliding_window is None else params.sliding_window - 1
    return {
        "softmax_scale": params.scale,
        "causal": True,
        "window_size": (before, 0),
        "softcap": params.soft_cap or 0.0,
    }


def obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this back-end cannot run on `device` with `dtype`, or None."""
    if device.type != "cuda":
        return f"needs a CUDA device, not {device.type}"
    needed = triton.obstacle(device, dtype)
    if needed is not None:
        return f"needs Triton's kernels beside it: {needed}"
    if dtype not in _DTYPES:
        return f"computes bfloat16 and float16, not {dtype}"
    return _package_obstacle()


def _package_obstacle() -> str | None:
    try:
        version = importlib.metadata.version("flash-attn")
    except importlib.metadata.PackageNotFoundError:
        return "the package flash-attn is not installed"
    if not _MIN_VERSION <= tuple(int(part) for part in version.split(".")[:2]) < _END_VERSION:
        return f"needs flash-attn 2.6 or a later 2.x, this is {version}"
    try:
        importlib.import_module("flash_attn")
    except ImportError as error:  # built for another torch
        return f"flash-attn cannot be imported: {error}"
    return None


def load() -> Kernels:
    """Imports the package and Triton; call it only where `obstacle` is None."""
    import flash_attn

    fallback = triton.load()
    return replace(fallback, attention=FlashAttention(flash_attn, fallback.attention))
