"""The roofline's arithmetic: bytes and flops of each kernel as functions of shapes. Pure.

A kernel's bytes are all its operands, each moved once. A flop is an addition or a multiplication; exponentials and
square roots count one, masked-out scores none. (Williams, Waterman, Patterson: Roofline, 2009.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench.ceilings import Ceilings

Lens = Sequence[tuple[int, int]]
"""`(query_len, seq_len)` of each seq."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What some work must move and compute at the least, in `dtype`. Costs of one dtype add up."""

    num_bytes: int
    flops: int
    dtype: torch.dtype

    def __add__(self, other: Cost) -> Cost:
        if other.dtype != self.dtype:
            raise ValueError(f"costs in {self.dtype} and {other.dtype} have no common ceiling")
        return Cost(self.num_bytes + other.num_bytes, self.flops + other.flops, self.dtype)

    def __mul__(self, times: int) -> Cost:
        return Cost(self.num_bytes * times, self.flops * times, self.dtype)

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: flops per byte."""
        return self.flops / self.num_bytes

    def memory_s(self, ceilings: Ceilings) -> float:
        """Seconds to read the bytes, with all arithmetic free."""
        return self.num_bytes / (ceilings.read_gb_s * 1e9)

    def compute_s(self, ceilings: Ceilings) -> float:
        """Seconds to compute the flops, with all memory free."""
        return self.flops / (ceilings.tflop_s(self.dtype) * 1e12)

    def limit_s(self, ceilings: Ceilings) -> float:
        """The roofline: no implementation is faster if both overlap entirely."""
        return max(self.memory_s(ceilings), self.compute_s(ceilings))

    def is_memory_bound(self, ceilings: Ceilings) -> bool:
        """Whether bytes, not flops, set the limit."""
        return self.memory_s(ceilings) >= self.compute_s(ceilings)


def linear_cost(tokens: int, in_features: int, out_features: int, dtype: torch.dtype) -> Cost:
    """`[T, in] @ [in, out]`."""
    elements = in_features * out_features + tokens * (in_features + out_features)
    return Cost(elements * dtype.itemsize, 2 * tokens * in_features * out_features, dtype)


def attention_cost(
    lens: Lens, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, window: int | None = None
) -> Cost:
    """Causal attention of `heads` `(H, Hkv)`: q, the result, visible keys and values once; 4·D flops per score."""
    num_heads, num_kv_heads = heads
    tokens = sum(query_len for query_len, _ in lens)
    kv_elements = 2 * num_kv_heads * head_dim * sum(_visible_keys(*each, window) for each in lens)
    scores = num_heads * sum(_scores(*each, window) for each in lens)
    return Cost((2 * tokens * num_heads * head_dim + kv_elements) * dtype.itemsize, 4 * head_dim * scores, dtype)


def rms_norm_cost(tokens: int, hidden: int, dtype: torch.dtype, *, adds: bool) -> Cost:
    """Reads x, writes the norm; `adds` reads and writes the residual too."""
    passes, flops = (4, 5) if adds else (2, 4)
    return Cost((passes * tokens + 1) * hidden * dtype.itemsize, flops * tokens * hidden, dtype)


def rotate_and_store_cost(tokens: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> Cost:
    """Reads qkv, cos and sin (float32), slots (int64); writes q, k in place and k, v into the cache."""
    num_heads, num_kv_heads = heads
    rows_moved = (num_heads + 2 * num_kv_heads) + (num_heads + num_kv_heads) + 2 * num_kv_heads
    num_bytes = tokens * (rows_moved * head_dim * dtype.itemsize + 4 * head_dim + 8)
    return Cost(num_bytes, 3 * tokens * (num_heads + num_kv_heads) * head_dim, dtype)


def silu_mul_cost(tokens: int, intermediate: int, dtype: torch.dtype) -> Cost:
    """Reads gate and up, writes their product."""
    return Cost(3 * tokens * intermediate * dtype.itemsize, 5 * tokens * intermediate, dtype)


def _visible_keys(query_len: int, seq_len: int, window: int | None) -> int:
    """Keys that any of the last `query_len` queries sees."""
    return seq_len if window is None else min(seq_len, query_len + window - 1)


def _scores(query_len: int, seq_len: int, window: int | None) -> int:
    """Visible (query, key) pairs: sum of min(p + 1, window) over positions p of the queries."""
    first, last = seq_len - query_len + 1, seq_len  # keys that the first and the last query see, without a window
    if window is None or window >= last:
        return (first + last) * query_len // 2
    if window <= first:
        return window * query_len
    return (first + window) * (window - first + 1) // 2 + window * (last - window)
