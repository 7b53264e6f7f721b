"""The door of every attention back-end: ragged batches over a paged KV cache.

Dimensions: B seqs, T tokens of the ragged batch, H query heads, Hkv KV heads, D head_dim,
N blocks, S block_size. One call serves chunks, fresh prompts and decode steps alike; a
back-end may branch on `AttentionMetadata.max_query_len`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """What attention must know of one step's batch; tensors on the pool's device.

    Causal mask, aligned to the bottom right: query i of seq b has absolute position
    `seq_lens[b] - query_len[b] + i` and sees keys `0 … position` (within the window, if any).
    """

    cu_seqlens_q: torch.Tensor
    """`[B + 1]` int32: first token of each seq in the ragged batch, then T."""
    seq_lens: torch.Tensor
    """`[B]` int32: tokens with KV after this step, `context_len + query_len`."""
    block_tables: torch.Tensor
    """`[B, max_blocks]` int32, padded with -1."""
    slot_mapping: torch.Tensor
    """`[T]` int64: `block_id * S + offset` where each token's K and V are stored."""
    query_lens_host: tuple[int, ...]
    """`query_len` of each seq, on the host, so that no back-end has to synchronize."""
    seq_lens_host: tuple[int, ...]
    """`seq_lens` on the host."""
    is_padded: bool = False
    """Whether there are tokens behind those of the last seq, as in a captured step: their results are zero. Lengths on
    the host are bounds then."""

    @property
    def max_query_len(self) -> int:
        """1 in a pure decode step."""
        return max(self.query_lens_host)

    @property
    def max_seq_len(self) -> int:
        """Longest context, this step's tokens included."""
        return max(self.seq_lens_host)


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What stays the same for every call of a layer."""

    scale: float
    """Factor on q·k, usually `head_dim ** -0.5`."""
    sliding_window: int | None = None
    """w: a query sees its last w positions, itself included."""
    soft_cap: float | None = None
    """c: scaled scores s become `c * tanh(s / c)` before the mask (Gemma 2)."""
    sinks: torch.Tensor | None = field(default=None, compare=False)
    """`[H]` float32, contiguous, on the pool's device: one more score in each softmax of a head, whose value is zero
    (gpt-oss; arXiv 2309.17453). Layers are of one kind whatever theirs are: equality leaves them out."""


class AttentionBackend(Protocol):
    """A way to compute attention. Stateless: all state is in the arguments."""

    @property
    def name(self) -> str:
        """The back-end's name in `--attention-backend`."""

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_layer: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Returns `[T, H, D]`, contiguous, for `q` `[T, H, D]`; KV of this step is already in `kv_layer`.

        `kv_layer` `[N, 2, Hkv, S, D]` is a strided view of the pool. `k`, `v` `[T, Hkv, D]` are
        this step's own, for back-ends that read fresh prompts from the ragged batch. q, k and v may be views
        with any stride over T; their heads are contiguous.
        """
