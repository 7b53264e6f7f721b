"""top-k and top-p as one threshold on the cost of each row, without a sort; min-p joins them for free.

    shortlist   a histogram of costs tells a cost that the threshold does not exceed; the
                costs up to it are gathered, in no order
    threshold   bisection over the gathered costs, snapped to costs that occur, until one is left

Semantics as in `engine.sampler.truncate`: tokens of equal cost stay or go together; top-k, then top-p
over what it left, then min-p. Counts and masses are integers, so the order does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from kernels.triton.row_mass import CHUNK, LAST_COST, MASS_UNITS, chunk_costs, is_filtered, mass_of, row_variant
from kernels.triton.variant import Variant

NUM_BINS = 256
"""Of the histogram, each 1/8 wide, up to `LAST_COST`."""
THRESHOLD_BLOCK = 2048
"""Shortlisted costs looked at together."""
SHORTLIST_WARPS = 4
THRESHOLD_WARPS = 8

_BINS_PER_UNIT: tl.constexpr = tl.constexpr(8.0)
_TAIL_MARGIN: tl.constexpr = tl.constexpr(1.001)
"""Covers float32 rounding of the bound on the tail's mass."""


def compile_variants(arch: int) -> Iterator[Variant]:
    """For a vocabulary of up to 2^18 tokens; alike on every `arch`."""
    yield row_variant(shortlist_kernel, SHORTLIST_WARPS, CHUNK=CHUNK, CHUNKS=128, BINS=NUM_BINS)
    yield row_variant(threshold_kernel, THRESHOLD_WARPS, BLOCK=THRESHOLD_BLOCK, CHUNKS=128)


@triton.jit
def bin_of(cost):
    """Exact: a bin's edges are multiples of 1/8."""
    return (cost * _BINS_PER_UNIT).to(tl.int32)


@triton.jit
def _cut(counts, total, top_k, top_p, BINS: tl.constexpr):
    """How many bins, from the best token's on, surely hold all that is kept; `counts` `[BINS]`.

    `top_k` is 0 if it takes no part; if it does, top-p keeps no more. Otherwise a bin is needed
    unless it and all after it weigh, at their lower edges, less than top-p leaves out.
    """
    by_k = tl.sum((tl.cumsum(counts, 0) < top_k).to(tl.int32), 0) + 1
    lower_edges = tl.arange(0, BINS).to(tl.float32) / _BINS_PER_UNIT
    tail = tl.cumsum(counts.to(tl.float32) * tl.exp(-lower_edges), 0, reverse=True) * (MASS_UNITS * _TAIL_MARGIN)
    by_p = tl.sum((tail > ((1.0 - top_p) * total.to(tl.float64)).to(tl.float32)).to(tl.int32), 0)
    return tl.where(top_k > 0, by_k, tl.maximum(by_p, 1))


@triton.jit
def shortlist_kernel(
    logits, best, temperature, top_k, top_p, masses, histogram, shortlist, shortlist_lens, row_stride,
    vocab_size, num_chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Appends one chunk's costs up to the cut to `shortlist` `[R, V]`, counted in `shortlist_lens` `[R]`."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    if is_filtered(k, p, vocab_size) & (tl.load(temperature + row) > 0):
        chunks = tl.arange(0, CHUNKS)
        total = tl.sum(tl.load(masses + row * num_chunks + chunks, mask=chunks < num_chunks, other=0), 0)
        counts = tl.load(histogram + row * BINS + tl.arange(0, BINS))
        num_bins = _cut(counts, total, tl.where(k < vocab_size, k, 0), p, BINS)
        cost = chunk_costs(logits, row_stride, best, temperature, row, chunk, vocab_size, num_chunks, CHUNK, CHUNKS)
        listed = (cost < LAST_COST) & (bin_of(cost) < num_bins)
        rank = tl.cumsum(listed.to(tl.int32), 0)
        start = tl.atomic_add(shortlist_lens + row, tl.max(rank, 0))
        tl.store(shortlist + row * vocab_size + start + rank - 1, cost, mask=listed)


@triton.jit
def _least_reaching(costs, num_costs, goal, BLOCK: tl.constexpr, BY_MASS: tl.constexpr):
    """The least of `costs` up to which they count (or weigh) `goal`; `LAST_COST` if all together do not.

    `goal` is int64. The least cost must be 0.
    """
    low = tl.zeros((), tl.float32)
    high = low + LAST_COST
    while low < high:
        pivot = low + (high - low) * 0.5
        pivot = tl.where(pivot < high, pivot, low)
        reached = tl.zeros((BLOCK,), tl.int64)
        below = tl.zeros((BLOCK,), tl.float32)
        above = below + LAST_COST
        for start in range(0, num_costs, BLOCK):
            index = start + tl.arange(0, BLOCK)
            cost = tl.load(costs + index, mask=index < num_costs, other=LAST_COST)
            near = cost <= pivot
            if BY_MASS:
                reached += tl.where(near, mass_of(cost), 0)
            else:
                reached += near.to(tl.int64)
            below = tl.maximum(below, tl.where(near, cost, 0.0))
            above = tl.minimum(above, tl.where(near, LAST_COST, cost))
        enough = tl.sum(reached, 0) >= goal
        high = tl.where(enough, tl.max(below, 0), high)
        low = tl.where(enough, low, tl.min(above, 0))
    return low


@triton.jit
def _mass_up_to(costs, num_costs, threshold, BLOCK: tl.constexpr):
    mass = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, num_costs, BLOCK):
        index = start + tl.arange(0, BLOCK)
        cost = tl.load(costs + index, mask=index < num_costs, other=LAST_COST)
        mass += tl.where(cost <= threshold, mass_of(cost), 0)
    return tl.sum(mass, 0)


@triton.jit
def threshold_kernel(
    shortlist, shortlist_lens, masses, temperature, top_k, top_p, min_p, thresholds, vocab_size, num_chunks,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """`thresholds` `[R]`: the greatest cost that all filters of a row keep, `LAST_COST` if there are none."""
    row = tl.program_id(0).to(tl.int64)
    k, p, least_p = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    threshold = tl.zeros((), tl.float32) + LAST_COST
    if is_filtered(k, p, vocab_size) & (tl.load(temperature + row) > 0):
        costs = shortlist + row * vocab_size
        num_costs = tl.load(shortlist_lens + row)
        chunks = tl.arange(0, CHUNKS)
        total = tl.sum(tl.load(masses + row * num_chunks + chunks, mask=chunks < num_chunks, other=0), 0)
        if (k > 0) & (k < vocab_size):
            threshold = _least_reaching(costs, num_costs, k.to(tl.int64), BLOCK, BY_MASS=False)
            total = _mass_up_to(costs, num_costs, threshold, BLOCK)
        if p < 1.0:
            goal = tl.ceil(p * total.to(tl.float64)).to(tl.int64)
            threshold = tl.minimum(threshold, _least_reaching(costs, num_costs, goal, BLOCK, BY_MASS=True))
    if least_p > 0.0:
        threshold = tl.minimum(threshold, -tl.log(least_p))  # the best token's weight is 1
    tl.store(thresholds + row, threshold)
