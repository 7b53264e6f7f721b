"""top-k and top-p as one threshold on the cost of each row, without a sort; min-p joins them for free.

    borders     a histogram of costs tells between which two of its bins the threshold must lie
    shortlist   the costs of those bins are gathered, in no order, and the masses of all better bins added up
    threshold   bisection over the gathered costs, snapped to costs that occur, until one is left

A flat row has tens of thousands of tokens up to the threshold, but only about a thousand are gathered: those that weigh
as much as the histogram's rounding, a 32nd of what is left out (an 8th from a cost of 8 on), and those of one bin.

Semantics as in `engine.sampler.truncate`: tokens of equal cost stay or go together; top-k, then top-p
over what it left, then min-p. Counts and masses are integers, so the order does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from kernels.triton.row_mass import CHUNK, LAST_COST, MASS_UNITS, chunk_costs, is_filtered, mass_of, row_variant
from kernels.triton.variant import Variant

NUM_BINS = 512
"""Bins of the histogram: 256 of 1/32, where the thresholds of flat rows lie, then bins of 1/8 up to `LAST_COST`. The
time grows with the number of bins."""
THRESHOLD_BLOCK = 4096
"""Shortlisted costs looked at together."""
BORDERS_WARPS = 4
SHORTLIST_WARPS = 4
THRESHOLD_WARPS = 8

_MARGIN: tl.constexpr = tl.constexpr(1.001)
"""Covers float32 rounding of bounds on masses."""


def compile_variants(arch: int) -> Iterator[Variant]:
    """For a vocabulary of up to 2^18 tokens; alike on every `arch`."""
    yield row_variant(borders_kernel, BORDERS_WARPS, CHUNKS=128, BINS=NUM_BINS)
    yield row_variant(shortlist_kernel, SHORTLIST_WARPS, CHUNK=CHUNK, CHUNKS=128)
    yield row_variant(threshold_kernel, THRESHOLD_WARPS, BLOCK=THRESHOLD_BLOCK, CHUNKS=128, BINS=NUM_BINS)


@triton.jit
def bin_of(cost):
    """Exact: a bin's edges are multiples of 1/32."""
    return tl.where(cost < 8.0, cost * 32.0, (cost - 8.0) * 8.0 + 256.0).to(tl.int32)


@triton.jit
def _first_cost_of(bins):
    return tl.where(bins < 256, bins / 32.0, bins / 8.0 - 24.0)


@triton.jit
def _bins_of_threshold(counts, total, top_k, top_p, vocab_size, BINS: tl.constexpr):
    """`(first, end)`: the threshold lies in one of these bins, whatever they hold; `counts` `[BINS]`, `total` of all.

    With top-k the last of them is the bin of the k-th cost, since top-p keeps no more. With top-p a bin is beyond the
    threshold if it and all after it weigh, at their lower edges, less than top-p leaves out; and before it if those
    after it weigh more than that at their upper edges, where a mass lacks less than one unit by its truncation.
    """
    bins = tl.arange(0, BINS)
    heavy = counts.to(tl.float32) * tl.exp(-_first_cost_of(bins)) * (MASS_UNITS * _MARGIN)
    end = BINS + 0
    by_k = (top_k > 0) & (top_k < vocab_size)
    if by_k:
        end = tl.minimum(tl.sum((tl.cumsum(counts, 0) < top_k).to(tl.int32), 0) + 1, BINS)
    first = end - 1
    if top_p < 1.0:
        kept = tl.where(by_k, tl.sum(tl.where(bins < end, heavy, 0.0), 0), total.to(tl.float32))
        left_out = ((1.0 - top_p) * kept.to(tl.float64)).to(tl.float32)
        if not by_k:
            tail = tl.cumsum(heavy, 0, reverse=True)
            end = tl.maximum(tl.sum((tail > left_out).to(tl.int32), 0), 1)
        light = counts.to(tl.float32) * tl.exp(-_first_cost_of(bins + 1)) * (MASS_UNITS / _MARGIN)
        light = tl.where(bins < tl.where(by_k, end - 1, BINS), light, 0.0)
        after = tl.cumsum(light, 0, reverse=True) - light
        first = tl.minimum(tl.sum((after - vocab_size > left_out * _MARGIN).to(tl.int32), 0), end - 1)
    return first, end


@triton.jit
def borders_kernel(
    masses, histogram, temperature, top_k, top_p, borders, vocab_size, num_chunks,
    CHUNKS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """`borders` `[R, 2]`: the first of the bins that may hold the threshold, and the one after the last."""
    row = tl.program_id(0).to(tl.int64)
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    if is_filtered(k, p, vocab_size) & (tl.load(temperature + row) > 0):
        total = _sum_of_chunks(masses, row, num_chunks, CHUNKS)
        counts = tl.load(histogram + row * BINS + tl.arange(0, BINS))
        first, end = _bins_of_threshold(counts, total, k, p, vocab_size, BINS)
        tl.store(borders + 2 * row, first)
        tl.store(borders + 2 * row + 1, end)


@triton.jit
def shortlist_kernel(
    logits, best, temperature, top_k, top_p, borders, sure_masses, shortlist, shortlist_lens, row_stride,
    vocab_size, num_chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Appends one chunk's costs in the threshold's bins to `shortlist` `[R, V]`, counted in `shortlist_lens` `[R]`.

    `sure_masses` `[R, C]`: what the chunk's tokens in better bins weigh.
    """
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    if is_filtered(k, p, vocab_size) & (tl.load(temperature + row) > 0):
        first, end = tl.load(borders + 2 * row), tl.load(borders + 2 * row + 1)
        cost = chunk_costs(logits, row_stride, best, temperature, row, chunk, vocab_size, num_chunks, CHUNK, CHUNKS)
        bins = bin_of(cost)
        tl.store(sure_masses + row * num_chunks + chunk, tl.sum(tl.where(bins < first, mass_of(cost), 0), 0))
        listed = (cost < LAST_COST) & (bins >= first) & (bins < end)
        rank = tl.cumsum(listed.to(tl.int32), 0)
        start = tl.atomic_add(shortlist_lens + row, tl.max(rank, 0))
        tl.store(shortlist + row * vocab_size + start + rank - 1, cost, mask=listed)


@triton.jit
def _sum_of_chunks(masses, row, num_chunks, CHUNKS: tl.constexpr):
    chunks = tl.arange(0, CHUNKS)
    return tl.sum(tl.load(masses + row * num_chunks + chunks, mask=chunks < num_chunks, other=0), 0)


@triton.jit
def _least_reaching(costs, num_costs, goal, BLOCK: tl.constexpr, BY_MASS: tl.constexpr):
    """The least of `costs` up to which they count (or weigh) `goal`; `LAST_COST` if all together do not.

    `goal` is int64, and more than 0.
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
    masses, histogram, borders, sure_masses, shortlist, shortlist_lens, temperature, top_k, top_p, min_p, thresholds,
    vocab_size, num_chunks,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """`thresholds` `[R]`: the greatest cost that all filters of a row keep, `LAST_COST` if there are none."""
    row = tl.program_id(0).to(tl.int64)
    k, p, least_p = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    threshold = tl.zeros((), tl.float32) + LAST_COST
    if is_filtered(k, p, vocab_size) & (tl.load(temperature + row) > 0):
        costs = shortlist + row * vocab_size
        num_costs = tl.load(shortlist_lens + row)
        total = _sum_of_chunks(masses, row, num_chunks, CHUNKS)
        sure_mass = _sum_of_chunks(sure_masses, row, num_chunks, CHUNKS)
        if (k > 0) & (k < vocab_size):
            bins = tl.arange(0, BINS)
            counts = tl.load(histogram + row * BINS + bins)
            sure_count = tl.sum(tl.where(bins < tl.load(borders + 2 * row), counts, 0), 0)
            threshold = _least_reaching(costs, num_costs, (k - sure_count).to(tl.int64), BLOCK, BY_MASS=False)
            total = sure_mass + _mass_up_to(costs, num_costs, threshold, BLOCK)
        if p < 1.0:
            goal = tl.ceil(p * total.to(tl.float64)).to(tl.int64) - sure_mass
            threshold = tl.minimum(threshold, _least_reaching(costs, num_costs, goal, BLOCK, BY_MASS=True))
    if least_p > 0.0:
        threshold = tl.minimum(threshold, -tl.log(least_p))  # the best token's weight is 1
    tl.store(thresholds + row, threshold)
