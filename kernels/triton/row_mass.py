"""What the sampling kernels share: cost and mass of a token, and reductions over a row's chunks.

    cost   (best logit - logit) / temperature, 0 for the best token
    mass   exp(-cost) in units of 2^-44, truncated to an integer

Integers add up to the same in any order, so a row's result depends on that row alone, however
many programs share it, and inverting the cumulative mass is exact. Truncation takes at most
2^-44 of the best token's weight from a token: less than 2^-25 of a row's mass in all.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from kernels.triton.variant import Variant

CHUNK = 2048
"""The elements of a row that a program looks at."""
MAX_VOCAB_SIZE = 1 << 19
"""So many tokens of the largest mass still sum to an int64."""

MASS_UNITS: tl.constexpr = tl.constexpr(float(1 << 44))
LAST_COST: tl.constexpr = tl.constexpr(32.0)
"""Costs from here on are all alike: their mass is 0 from 44 ln 2 = 30.5 on."""
_TYPES = {
    **dict.fromkeys(("logits", "best", "temperature", "min_p", "shortlist", "thresholds"), "*fp32"),
    **dict.fromkeys(("best_ids", "top_k", "histogram", "shortlist_lens", "borders"), "*i32"),
    **dict.fromkeys(("masses", "sure_masses", "seed", "choice_index", "output_index", "token_ids"), "*i64"),
    "top_p": "*fp64",
}
"""Types of the sampling kernels' arguments; equal names have equal types."""
_MIN_TEMPERATURE: tl.constexpr = tl.constexpr(1e-30)
"""Below it float32 runs out of exponents; the draw is the best token well before."""


def row_variant(kernel: Any, num_warps: int, **constexprs: int) -> Variant:
    """A compilation of a sampling kernel."""
    label = f"sampling {kernel.__name__.strip('_').removesuffix('_kernel')}"
    return Variant(kernel, _TYPES, constexprs, num_warps, label, aligned=frozenset(("row_stride", "vocab_size")))


@triton.jit
def cost_of(logits, best, temperature):
    """At most `LAST_COST`, which NaN becomes too. Exactly rounded: equal in every kernel that asks."""
    cost = tl.div_rn(best - logits, tl.maximum(temperature, _MIN_TEMPERATURE))
    return tl.where(cost < LAST_COST, cost, LAST_COST)


@triton.jit
def mass_of(cost):
    """Int64, 2^44 for the best token."""
    return (tl.exp(-cost) * MASS_UNITS).to(tl.int64)


@triton.jit
def is_filtered(top_k, top_p, vocab_size):
    """Whether top-k or top-p takes part in a row."""
    return ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0)


@triton.jit
def first_best(values):
    """The maximum of `values` and its first index; NaN wins over all."""
    is_nan = values != values  # noqa: PLR0124 - what NaN alone does
    best, index = tl.max(
        tl.where(is_nan, float("-inf"), values), 0, return_indices=True, return_indices_tie_break_left=True
    )
    return tl.where(tl.max(is_nan.to(tl.int32), 0) > 0, float("nan"), best), index


@triton.jit
def best_of_chunks(best, row, num_chunks, CHUNKS: tl.constexpr):
    """The row's maximum and the first chunk that has it, from `best` `[R, num_chunks]`."""
    chunks = tl.arange(0, CHUNKS)
    return first_best(tl.load(best + row * num_chunks + chunks, mask=chunks < num_chunks, other=float("-inf")))


@triton.jit
def chunk_costs(
    logits, row_stride, best, temperature, row, chunk, vocab_size, num_chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Returns the `[CHUNK]` costs of a chunk; padding costs `LAST_COST`."""
    row_best, _ = best_of_chunks(best, row, num_chunks, CHUNKS)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row * row_stride + columns, mask=columns < vocab_size, other=float("-inf"))
    return cost_of(values, row_best, tl.load(temperature + row))
