"""The roofline's arithmetic: bytes and flops of each kernel as functions of shapes. Pure.

A kernel's bytes are all its operands, each moved once. A flop is an addition or a multiplication; exponentials and
square roots count one, masked-out scores none. (Williams, Waterman, Patterson: Roofline, 2009.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.kernels.ceilings import Ceilings

HEADER = f"{'kernel':<17}{'shape':<50}{'by':<11}{'µs':>11}{'GB/s':>9}{'TFLOP/s':>9}{'flop/B':>9}  share of ceiling"
Lens = Sequence[tuple[int, int]]
"""`(query_len, seq_len)` of each seq."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What some work must move and compute at the least, in `dtype`."""

    num_bytes: int
    flops: int
    dtype: torch.dtype

    def limits_s(self, ceilings: Ceilings) -> tuple[float, float]:
        """Seconds to read the bytes, with all arithmetic free; to compute the flops, with all memory free.

        The larger is the roofline: no implementation is faster if both overlap entirely.
        """
        return self.num_bytes / (ceilings.read_gb_s * 1e9), self.flops / (ceilings.tflop_s(self.dtype) * 1e12)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One kernel at one shape by one implementation."""

    kernel: str
    shape: str
    by: str
    time_s: float
    cost: Cost

    def document(self, ceilings: Ceilings) -> dict[str, Any]:
        """For the record. A share of more than 1 means that a cache served what memory was counted for."""
        memory_s, compute_s = self.cost.limits_s(ceilings)
        return {
            "kernel": self.kernel,
            "shape": self.shape,
            "by": self.by,
            "time_us": self.time_s * 1e6,
            "bytes": self.cost.num_bytes,
            "flops": self.cost.flops,
            "flops_per_byte": self.cost.flops / self.cost.num_bytes,
            "gb_s": self.cost.num_bytes / self.time_s / 1e9,
            "tflop_s": self.cost.flops / self.time_s / 1e12,
            "share_of_ceiling": max(memory_s, compute_s) / self.time_s,
            "bound": "memory" if memory_s >= compute_s else "compute",
        }

    def row(self, ceilings: Ceilings) -> str:
        """Returns the table's row of this measurement."""
        each = self.document(ceilings)
        figures = f"{each['time_us']:>11.1f}{each['gb_s']:>9.1f}{each['tflop_s']:>9.3f}{each['flops_per_byte']:>9.1f}"
        share = f"{each['share_of_ceiling']:>6.1%} of {each['bound']}"
        return f"{self.kernel:<17}{self.shape:<50}{self.by:<11}{figures}  {share}"


def linear_cost(tokens: int, in_features: int, out_features: int, dtype: torch.dtype) -> Cost:
    """`[T, in] @ [in, out]`."""
    elements = in_features * out_features + tokens * (in_features + out_features)
    return Cost(elements * dtype.itemsize, 2 * tokens * in_features * out_features, dtype)


def attention_cost(lens: Lens, heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> Cost:
    """Causal attention of `heads` `(H, Hkv)`: q, the result, visible keys and values once; 4·D flops per score."""
    num_heads, num_kv_heads = heads
    tokens = sum(query_len for query_len, _ in lens)
    kv_elements = 2 * num_kv_heads * head_dim * sum(seq_len for _, seq_len in lens)
    scores = num_heads * sum((2 * seq_len - query_len + 1) * query_len // 2 for query_len, seq_len in lens)
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
