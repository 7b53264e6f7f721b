"""One engine step: scheduled seqs in, sampled tokens out. Runs on the engine thread only.

Owns nothing: model and KV cache are lent to it. It knows no seq beyond the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.batch import build_batch
from engine.forward import Forward
from engine.graphs import DecodeGraphs
from engine.kv_cache import KvCache
from engine.sampler import TORCH_DRAWS, Draws, sample
from engine.step import Sampled, ScheduledSeq


class Runner:
    """Steps `decoder` over `kv_cache`; decode steps through `graphs`, tokens are drawn by `draws`."""

    def __init__(
        self,
        decoder: Forward,
        kv_cache: KvCache,
        graphs: DecodeGraphs | None = None,
        draws: Draws = TORCH_DRAWS,
    ) -> None:
        self._decoder = decoder
        self._graphs = graphs
        self._draws = draws
        self._kv = kv_cache.tensor  # [N, L, 2, Hkv, S, D]
        self._block_size = kv_cache.layout.block_size

    def step(self, seqs: Sequence[ScheduledSeq]) -> list[Sampled | None]:
        """Computes KV of every scheduled token, in place; samples where a seq asks for it.

        KV is written when it returns, on a GPU too: other streams may read it (`engine.mirror`).
        """
        if not seqs:
            return []
        with torch.inference_mode():
            batch = build_batch(seqs, self._block_size, self._kv.device)
            logits = None if self._graphs is None else self._graphs.run(batch)
            if logits is None:
                logits = self._decoder.forward(
                    batch.token_ids, batch.positions, self._kv, batch.metadata, batch.sample_rows
                )  # [R, V]
            tokens = iter(sample(logits, batch.sample_specs, self._draws))
            if self._kv.is_cuda and not batch.sample_specs:  # else tokens on the host have waited for all of it
                torch.cuda.current_stream(self._kv.device).synchronize()
        return [None if seq.sample is None else next(tokens) for seq in seqs]
