"""Attention of a rank that shares its K/V head: to the bit as the rank that would have all queries of that head.

How a decode kernel adds up a query's softmax may depend on how many queries of the K/V head there are, and on which of
them it is. So each takes its own place among as many; what the others' places give is thrown away. Decode reads far
more than it computes, so that this costs little.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kernels.attention import AttentionBackend, AttentionMetadata, AttentionParams


@dataclass(frozen=True, slots=True)
class WholeGroups:
    """Implements `kernels.attention.AttentionBackend` for a single K/V head."""

    backend: AttentionBackend
    ranks: int
    """Ranks that share the head."""
    place: int
    """Number of this rank among these."""

    @property
    def name(self) -> str:
        """See `AttentionBackend`."""
        return self.backend.name

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_layer: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        """See `AttentionBackend`."""
        if min(metadata.query_lens_host) > 1:  # prompts alone: a head's results do not depend on its neighbours
            return self.backend.attend(q, k, v, kv_layer, metadata, params)
        sinks = None if params.sinks is None else self._placed(params.sinks[None])[0]
        attended = self.backend.attend(self._placed(q), k, v, kv_layer, metadata, replace(params, sinks=sinks))
        return attended.chunk(self.ranks, dim=1)[self.place].contiguous()

    def _placed(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, own heads, …]` → `[T, heads, …]`, zeros in the others' places."""
        every = x.new_zeros(len(x), self.ranks, *x.shape[1:])
        every[:, self.place] = x
        return every.flatten(1, 2)
