"""The decoder as a step sees it: the seam between the engine and models."""

from __future__ import annotations

from typing import Protocol

import torch

from kernels.attention import AttentionMetadata


class Forward(Protocol):
    """`models.decoder.Decoder`, or a fake."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        sample_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Stores KV of `[T]` tokens in `kv_cache`; returns logits `[R, V]` of `sample_rows` `[R]`."""
