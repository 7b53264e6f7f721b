"""The roofline's arithmetic: bytes and flops of each kernel and phase as functions of shapes. Pure.

A kernel's bytes are all its operands, each moved once. A phase's bytes are weights and KV only: a
step's activations fit in a cache, so counting them would set the limit too high to be one. A flop
is an addition or a multiplication; exponentials and square roots count one, masked-out scores none.
(Williams, Waterman, Patterson: Roofline, 2009.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench.ceilings import Ceilings
from models.config import ModelConfig

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


# Kernels.


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


# Phases.


def step_cost(config: ModelConfig, lens: Lens, dtype: torch.dtype) -> Cost:
    """One step over a ragged batch that samples each seq's last token: linear maps, attention, and the head.

    Of the last layer only KV is needed for all tokens, the rest for the sampled ones alone.
    """
    tokens, rows, layers = sum(query_len for query_len, _ in lens), len(lens), config.num_layers
    hidden, heads = config.hidden_size, (config.num_heads, config.num_kv_heads)
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    kv_weights, lm_head = 2 * hidden * kv_size, config.vocab_size * hidden
    read, used = _mlp_weights(config, tokens)
    weights = kv_weights + 2 * hidden * query_size + used
    multiplied = tokens * (weights * (layers - 1) + kv_weights) + rows * (weights - kv_weights)
    sampled = [(1, seq_len) for _, seq_len in lens]
    attended = [
        attention_cost(sampled if layer == layers - 1 else lens, heads, config.head_dim, dtype, window)
        for layer, window in enumerate(config.windows)
    ]
    queries = 2 * (tokens * (layers - 1) + rows) * query_size  # q and the result, which stay in the cache
    kv_bytes = sum(each.num_bytes for each in attended) - queries * dtype.itemsize
    kv_bytes += 2 * tokens * kv_size * layers * dtype.itemsize  # written, before it is read
    linear = Cost((weights + read - used) * layers * dtype.itemsize, 2 * multiplied, dtype)
    attention = Cost(kv_bytes, sum(each.flops for each in attended), dtype)
    return linear + attention + Cost(lm_head * dtype.itemsize, 2 * rows * lm_head, dtype)


def _mlp_weights(config: ModelConfig, tokens: int) -> tuple[int, int]:
    """Of a layer's MLP, mean over layers: those that `tokens` read, and those that each of them is multiplied by.

    Of experts: as many different ones as routers that choose evenly would name (each layer's own router is trained to).
    """
    plain, experts = 3 * config.hidden_size * config.intermediate_size, config.experts
    if experts is None:
        return plain, plain
    share = sum(experts.layers) / len(experts.layers)
    one = 3 * config.hidden_size * experts.intermediate_size
    always = (1 - share) * plain + share * 3 * config.hidden_size * (experts.shared_intermediate_size or 0)
    named = experts.num_experts * (1 - (1 - experts.num_active / experts.num_experts) ** tokens)
    return int(always + share * named * one), int(always + share * experts.num_active * one)


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
