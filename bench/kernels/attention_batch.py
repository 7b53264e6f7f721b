"""Tensors of one attention call: a shuffled paged pool of several layers, and the same KV laid out densely.

Layers take turns, so that no call finds its KV in a cache that a model's next layer would not.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, tee

import torch

from bench.kernels.shapes import AttentionShape
from bench.support.timing import Call
from kernels.attention import AttentionBackend, AttentionMetadata, AttentionParams
from kernels.quantized_kv import quantize_rows

_TURNOVER_BYTES = 192 << 20
"""KV of all layers, at least."""
_MAX_LAYERS = 30


class AttentionBatch:
    """Random q, k, v and pool of `shape`; the pool already holds k and v of this step.

    With `kv_dtype` the pool is quantised to it, for shapes that have context alone.
    """

    def __init__(
        self, shape: AttentionShape, dtype: torch.dtype, device: torch.device, kv_dtype: torch.dtype | None = None
    ) -> None:
        self.shape = shape
        self.device = device
        self._params = AttentionParams(shape.head_dim**-0.5)
        self._num_layers = min(_MAX_LAYERS, -(-_TURNOVER_BYTES // shape.kv_bytes(dtype)))
        counts = [-(-seq_len // shape.block_size) for _, seq_len in shape.lens]
        ids = random.Random(0).sample(range(sum(counts)), sum(counts))
        starts = tuple(accumulate(counts, initial=0))
        self._tables = [ids[start : start + count] for start, count in zip(starts, counts, strict=False)]
        pool_shape = (sum(counts), shape.num_kv_heads, self._num_layers, 2, shape.block_size, shape.head_dim)
        self._kv = _by_layer(torch.randn(pool_shape, dtype=dtype, device=device))
        rows = shape.num_heads + 2 * shape.num_kv_heads
        self._qkv = torch.randn((shape.num_tokens, rows, shape.head_dim), dtype=dtype, device=device)
        self.metadata = self._make_metadata(device)
        for layer in range(self._num_layers):
            self._store(self._kv[:, layer])
        if kv_dtype is not None:
            self._kv = _quantized_pool(self._kv, kv_dtype)

    def calls(self, backend: AttentionBackend) -> list[Call]:
        """`backend` on each layer in turn."""
        q, k, v = self._ragged()

        def attend(layer: int) -> torch.Tensor:
            return backend.attend(q, k, v, self._kv[:, layer], self.metadata, self._params)

        return [partial(attend, layer) for layer in range(self._num_layers)]

    def queries(self) -> torch.Tensor:
        """`[T, H, D]`."""
        return self._ragged()[0]

    def dense(self, layer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Contiguous keys and values of each seq, `[Hkv, seq_len, D]`; a copy."""
        kv = self._kv[:, layer].permute(1, 2, 0, 3, 4)  # [2, Hkv, N, S, D]
        seqs = zip(self._tables, self.shape.lens, strict=True)
        keys, values = (
            [side[:, table].flatten(1, 2)[:, :seq_len].contiguous() for table, (_, seq_len) in seqs_of_side]
            for side, seqs_of_side in zip(kv, tee(seqs), strict=True)
        )
        return list(zip(keys, values, strict=True))

    @property
    def num_layers(self) -> int:
        """Layers that take turns."""
        return self._num_layers

    @property
    def kv_layer(self) -> torch.Tensor:
        """The first layer `[N, 2, Hkv, S, D]`, a strided view."""
        return self._kv[:, 0]

    def _ragged(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        k_start = self.shape.num_heads
        v_start = k_start + self.shape.num_kv_heads
        return self._qkv[:, :k_start], self._qkv[:, k_start:v_start], self._qkv[:, v_start:]

    def _store(self, kv_layer: torch.Tensor) -> None:
        """What `rotate_and_store` does for k and v."""
        slots = self.metadata.slot_mapping
        where = slots // self.shape.block_size, slots % self.shape.block_size
        by_slot = kv_layer.permute(1, 0, 3, 2, 4)  # [2, N, S, Hkv, D], a view
        for side, rows in zip(by_slot, self._ragged()[1:], strict=True):
            side.index_put_(where, rows)

    def _make_metadata(self, device: torch.device) -> AttentionMetadata:
        query_lens, seq_lens = zip(*self.shape.lens, strict=True)
        width = max(len(table) for table in self._tables)
        padded = [table + [-1] * (width - len(table)) for table in self._tables]
        return AttentionMetadata(
            cu_seqlens_q=torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32, device=device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            block_tables=torch.tensor(padded, dtype=torch.int32, device=device),
            slot_mapping=self._slots(device),
            query_lens_host=query_lens,
            seq_lens_host=seq_lens,
        )

    def _slots(self, device: torch.device) -> torch.Tensor:
        size = self.shape.block_size
        slots: list[torch.Tensor] = []
        for table, (query_len, seq_len) in zip(self._tables, self.shape.lens, strict=True):
            positions = torch.arange(seq_len - query_len, seq_len)
            slots.append(torch.tensor(table)[positions // size] * size + positions % size)
        return torch.cat(slots).to(device)


def _quantized_pool(kv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A pool `[N, L, 2, Hkv, S, D]` as `dtype`, each head's scales behind its elements (`kernels.quantized_kv`)."""
    values, scales = quantize_rows(kv.permute(0, 3, 1, 2, 4, 5).contiguous(), dtype)  # [N, Hkv, L, 2, S, D], [… S]
    raw = torch.cat([values.view(torch.uint8).flatten(-2), scales.view(torch.uint8)], -1)
    block_size, head_dim = kv.shape[-2:]
    rows = raw.view(dtype)[..., : block_size * head_dim]
    return _by_layer(rows.view(*rows.shape[:-1], block_size, head_dim))


def _by_layer(memory: torch.Tensor) -> torch.Tensor:
    """A pool as it lies in memory, `[N, Hkv, L, 2, S, D]` → the view `[N, L, 2, Hkv, S, D]` that kernels get."""
    return memory.permute(0, 2, 3, 1, 4, 5)


def largest_difference(left: torch.Tensor, right: torch.Tensor) -> float:
    """Largest absolute difference of two results."""
    return float((left.float() - right.float()).abs().max())


def rows_of(results: Sequence[torch.Tensor]) -> torch.Tensor:
    """Results of several seqs `[H, query_len, D]` as the ragged batch has them: `[T, H, D]`."""
    return torch.cat([result.transpose(0, 1) for result in results])
