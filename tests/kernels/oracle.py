"""Attention written out in float64, one seq at a time: what every back-end is compared with."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import accumulate

import torch

from kernels.attention import AttentionBackend, AttentionMetadata, AttentionParams
from kernels.quantized_kv import kv_scales, quantize_rows
from tandem.kv_layout import SCALE_BYTES

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Bound on the error of one output element, absolute and relative, of normal inputs."""

LENS = {
    "decode": [(1, 1), (1, 7), (1, 16), (1, 17), (1, 33)],
    "fresh prompts": [(5, 5), (16, 16), (33, 33)],
    "chunks": [(4, 20), (16, 32), (3, 50)],
    "mixed": [(1, 9), (12, 12), (1, 32), (7, 40), (1, 1)],
}


QUANTIZED = [torch.int8, torch.float8_e4m3fn]


def named(name: str) -> Callable[[str], str]:
    """For `assert_close`: whose result it is stands before what it says."""
    return lambda message: f"{name}: {message}"


def moved(view: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """`view` on `device` with all that lies around it, and the strides that it has here: `Tensor.to` would pack it."""
    memory = torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage()).to(device)
    there = torch.empty(0, dtype=view.dtype, device=device)
    return there.set_(memory.untyped_storage(), view.storage_offset(), view.shape, view.stride())


def empty_pool(num_blocks, num_layers, num_kv_heads, block_size, head_dim, dtype):
    """A pool `[N, L, 2, Hkv, S, D]`, head-major in memory as a served one, with scales where `dtype` is quantized.

    Every bit is set: NaN, but for int8.
    """
    element_bytes = torch.empty(0, dtype=dtype).element_size()
    width = block_size * (head_dim * element_bytes + (SCALE_BYTES if dtype in QUANTIZED else 0))
    memory = torch.full((num_blocks, num_kv_heads, num_layers, 2, width), 0xFF, dtype=torch.uint8).view(dtype)
    return memory[..., : block_size * head_dim].unflatten(-1, (block_size, head_dim)).permute(0, 2, 3, 1, 4, 5)


def indexable(rows: torch.Tensor) -> torch.Tensor:
    """A view of the same bytes: torch does not index by tensors what is quantized."""
    return rows.view(torch.uint8) if rows.dtype in QUANTIZED else rows


class Case:
    """A batch over a shuffled pool; slots that hold no token are NaN, `-1` pads the tables.

    Over quantized KV the truth is what the pool holds, and this step's own k and v are NaN: nobody may read them.
    """

    def __init__(self, lens, block_size, heads=(4, 2), head_dim=8, dtype=torch.float32, seed=0, kv_dtype=None):
        generator = torch.Generator().manual_seed(seed)
        num_heads, num_kv_heads = heads
        self.lens = lens
        query_lens, seq_lens = zip(*lens, strict=True)
        counts = [-(-seq_len // block_size) for seq_len in seq_lens]
        ids = list(range(sum(counts) + 3))
        random.Random(seed).shuffle(ids)
        self.tables = [[ids.pop() for _ in range(count)] for count in counts]
        width = max(counts) + 1
        self.keys, self.values = (
            [torch.randn(n, num_kv_heads, head_dim, generator=generator, dtype=torch.float64) for n in seq_lens]
            for _ in range(2)
        )
        pool = empty_pool(sum(counts) + 3, 2, num_kv_heads, block_size, head_dim, kv_dtype or dtype)
        self.kv_layer = pool[:, 1]  # a strided view, as a layer of the pool is
        slots = [[table[p // block_size] * block_size + p % block_size for p in range(n)] for table, n in self._each()]
        self.k, self.v = (
            torch.cat([t[-q:] for t, q in zip(side, query_lens, strict=True)]).to(dtype)
            for side in (self.keys, self.values)
        )
        self.q = torch.randn(sum(query_lens), num_heads, head_dim, generator=generator, dtype=torch.float64).to(dtype)
        self.metadata = AttentionMetadata(
            cu_seqlens_q=torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_tables=torch.tensor([t + [-1] * (width - len(t)) for t in self.tables], dtype=torch.int32),
            slot_mapping=torch.tensor([slot for row, q in zip(slots, query_lens, strict=True) for slot in row[-q:]]),
            query_lens_host=query_lens,
            seq_lens_host=seq_lens,
        )
        for side, tensors in enumerate((self.keys, self.values)):
            for (table, seq_len), tensor in zip(self._each(), tensors, strict=True):
                self._store(side, table, tensor[:seq_len].to(dtype), kv_dtype)
        self.keys, self.values = (
            [self._stored(side, table, seq_len) for table, seq_len in self._each()] for side in range(2)
        )
        if kv_dtype is not None:
            self.k, self.v = (torch.full_like(each, torch.nan) for each in (self.k, self.v))

    def _store(self, side, table, rows, kv_dtype):
        """Rows `[K, Hkv, D]` of one seq into its blocks."""
        values, scales = (rows, None) if kv_dtype is None else quantize_rows(rows, kv_dtype)
        positions = torch.arange(len(rows))
        size = self.kv_layer.shape[3]
        blocks, slots = torch.tensor(table)[positions // size], positions % size
        indexable(self.kv_layer)[blocks, side, :, slots] = indexable(values)
        if scales is not None:
            kv_scales(self.kv_layer)[blocks, side, :, slots] = scales

    def _stored(self, side, table, seq_len):
        """What the pool holds of one seq, `[K, Hkv, D]` float64."""
        blocks = indexable(self.kv_layer)[table, side].view(self.kv_layer.dtype).double()
        if self.kv_layer.dtype in QUANTIZED:
            blocks *= kv_scales(self.kv_layer)[table, side].double()[..., None]
        return blocks.transpose(1, 2).flatten(0, 1)[:seq_len]

    def _each(self):
        return zip(self.tables, (seq_len for _, seq_len in self.lens), strict=True)

    def to(self, device):
        """The same case on another device."""
        names = ("cu_seqlens_q", "seq_lens", "block_tables", "slot_mapping")
        self.metadata = replace(self.metadata, **{name: getattr(self.metadata, name).to(device) for name in names})
        self.q, self.k, self.v, self.kv_layer = (moved(x, device) for x in (self.q, self.k, self.v, self.kv_layer))
        return self

    def sinks(self):
        """One per head, some above every score."""
        return torch.linspace(-2.0, 9.0, self.q.shape[1])

    def attend(self, backend, window=None, soft_cap=None, *, sunk=False):
        sinks = self.sinks().to(self.q.device) if sunk else None
        params = AttentionParams(self.q.shape[-1] ** -0.5, window, soft_cap, sinks)
        return backend.attend(self.q, self.k, self.v, self.kv_layer, self.metadata, params)

    def oracle(self, window=None, soft_cap=None, *, sunk=False):
        """Softmax of each query over the keys that it sees, and its head's sink, in float64."""
        group = self.q.shape[1] // self.keys[0].shape[1]
        queries = self.q.double().cpu().split([query_len for query_len, _ in self.lens])
        out = []
        for q, (query_len, seq_len), keys, values in zip(queries, self.lens, self.keys, self.values, strict=True):
            wide = [side.repeat_interleave(group, 1) for side in (keys, values)]
            scores = torch.einsum("qhd,khd->hqk", q, wide[0]) / math.sqrt(q.shape[-1])
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            distance = torch.arange(seq_len - query_len, seq_len)[:, None] - torch.arange(seq_len)  # [Q, K]
            seen = (distance >= 0) & (distance < (window or seq_len))
            scores = scores.masked_fill(~seen, -torch.inf)
            if sunk:
                sinks = self.sinks().double()[:, None, None].expand(-1, query_len, 1)
                scores = torch.cat((scores, sinks), dim=-1)
            out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :seq_len], wide[1]))
        return torch.cat(out)

    def check(self, backend, window=None, soft_cap=None, *, sunk=False):
        """`backend` is within its dtype's bound of the oracle; returns what it computed."""
        (out,) = self.check_each({backend.name: backend}, window, soft_cap, sunk=sunk)
        return out

    def check_each(self, backends: Mapping[str, AttentionBackend], window=None, soft_cap=None, *, sunk=False):
        """As `check`, each of `backends` by its name."""
        expected = self.oracle(window, soft_cap, sunk=sunk)
        tolerance = TOLERANCES[self.q.dtype]
        outs = [self.attend(backend, window, soft_cap, sunk=sunk) for backend in backends.values()]
        for name, out in zip(backends, outs, strict=True):
            assert out.shape == self.q.shape, name
            assert out.dtype == self.q.dtype, name
            torch.testing.assert_close(out.double().cpu(), expected, atol=tolerance, rtol=tolerance, msg=named(name))
        return outs
