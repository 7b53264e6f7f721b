"""Draws the next token of each row on the device, with no sort and no wait for the host.

The semantics are `engine.sampler`'s: a token is a pure function of its row of logits, its
parameters and its counter. Eight launches (one clears scratch), whatever the parameters:

    best        maximum and first index of each chunk of a row
    weigh       mass of each chunk; a histogram of costs where top-k or top-p is on
    borders     of the bins that the threshold may be in   `kernels.triton.truncation`
    shortlist   costs that may be the threshold              `kernels.triton.truncation`
    threshold   greatest cost kept                           `kernels.triton.truncation`
    truncate    mass of each chunk up to the threshold
    pick        Philox4x32-10 (SC 2011) and the inverse of the cumulative mass

Against `engine.sampler` with the same logits a drawn token differs only where the uniform
number, or the border of a nucleus, falls within rounding of a border between two tokens: 2^-19
of a token's weight (the device's exp) and 2^-25 of the row's mass (`kernels.triton.row_mass`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.sampling import DrawParams
from kernels.spec import Dims
from kernels.triton.row_mass import (
    CHUNK,
    LAST_COST,
    MAX_VOCAB_SIZE,
    best_of_chunks,
    chunk_costs,
    first_best,
    is_filtered,
    mass_of,
    row_variant,
)
from kernels.triton.truncation import (
    BORDERS_WARPS,
    NUM_BINS,
    SHORTLIST_WARPS,
    THRESHOLD_BLOCK,
    THRESHOLD_WARPS,
    bin_of,
    borders_kernel,
    shortlist_kernel,
    threshold_kernel,
)
from kernels.triton.variant import Variant, launch_options
from tandem.errors import InternalError

_NUM_WARPS = 4


class TritonSampler:
    """Implements `kernels.sampling.Sampler`."""

    def draw(self, logits: torch.Tensor, params: DrawParams) -> torch.Tensor:
        """See `Sampler.draw`. Takes about as much memory as the logits do."""
        sizes = _check_logits(logits)
        for name, dtype in _PARAM_DTYPES.items():
            sizes.check(name, getattr(params, name), ("R",), dtype, logits.device)
        rows, vocab_size = logits.shape
        token_ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
        if not rows:
            return token_ids
        scratch = _Scratch.allocate(rows, vocab_size, logits.device)
        num_chunks = scratch.best.shape[1]
        grid = (num_chunks, rows)
        row = (logits.stride(0), vocab_size, num_chunks)
        tile = {"CHUNK": CHUNK, "CHUNKS": triton.next_power_of_2(num_chunks)}
        filters = (params.temperature, params.top_k, params.top_p)
        options = launch_options(_NUM_WARPS)
        _best_kernel[grid](logits, scratch.best, scratch.best_ids, *row, CHUNK=CHUNK, **options)
        _weigh_kernel[grid](
            *(logits, scratch.best, *filters, scratch.masses, scratch.histogram),
            *row,
            **tile,
            BINS=NUM_BINS,
            **options,
        )
        borders_kernel[(rows,)](
            *(scratch.masses, scratch.histogram, *filters, scratch.borders),
            *row[1:],
            CHUNKS=tile["CHUNKS"],
            BINS=NUM_BINS,
            **launch_options(BORDERS_WARPS),
        )
        listed = (scratch.borders, scratch.sure_masses, scratch.shortlist, scratch.shortlist_lens)
        shortlist_kernel[grid](
            *(logits, scratch.best, *filters, *listed), *row, **tile, **launch_options(SHORTLIST_WARPS)
        )
        threshold_kernel[(rows,)](
            *(scratch.masses, scratch.histogram, *listed, *filters, params.min_p, scratch.thresholds),
            *row[1:],
            BLOCK=THRESHOLD_BLOCK,
            CHUNKS=tile["CHUNKS"],
            BINS=NUM_BINS,
            **launch_options(THRESHOLD_WARPS),
        )
        truncated = (scratch.best, params.temperature, scratch.thresholds, scratch.masses)
        _truncate_kernel[grid](logits, *truncated, *row, **tile, **options)
        counters = (params.seed, params.output_index)
        _pick_kernel[(rows,)](
            *(logits, scratch.best, scratch.best_ids, *truncated[1:], *counters, token_ids),
            *row,
            **tile,
            **options,
        )
        return token_ids

    def best_tokens(self, logits: torch.Tensor) -> torch.Tensor:
        """See `Sampler.best_tokens`."""
        _check_logits(logits)
        rows, vocab_size = logits.shape
        token_ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
        if rows:
            num_chunks = triton.cdiv(vocab_size, CHUNK)
            best = torch.empty(rows, num_chunks, dtype=torch.float32, device=logits.device)
            best_ids = torch.empty(rows, num_chunks, dtype=torch.int32, device=logits.device)
            row = (logits.stride(0), vocab_size, num_chunks)
            options, chunks = launch_options(_NUM_WARPS), triton.next_power_of_2(num_chunks)
            _best_kernel[(num_chunks, rows)](logits, best, best_ids, *row, CHUNK=CHUNK, **options)
            _best_token_kernel[(rows,)](best, best_ids, token_ids, num_chunks, CHUNKS=chunks, **launch_options(1))
        return token_ids


def compile_variants(arch: int) -> Iterator[Variant]:
    """For a vocabulary of up to 2^18 tokens; alike on every `arch`."""
    yield row_variant(_best_kernel, _NUM_WARPS, CHUNK=CHUNK)
    yield row_variant(_best_token_kernel, 1, CHUNKS=128)
    yield row_variant(_weigh_kernel, _NUM_WARPS, CHUNK=CHUNK, CHUNKS=128, BINS=NUM_BINS)
    yield row_variant(_truncate_kernel, _NUM_WARPS, CHUNK=CHUNK, CHUNKS=128)
    yield row_variant(_pick_kernel, _NUM_WARPS, CHUNK=CHUNK, CHUNKS=128)


_PARAM_DTYPES = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float64,
    "min_p": torch.float32,
    "seed": torch.int64,
    "output_index": torch.int64,
}


@dataclass(frozen=True, slots=True)
class _Scratch:
    """What the kernels of one `draw` leave for each other; C chunks of a row."""

    best: torch.Tensor  # [R, C] float32
    best_ids: torch.Tensor  # [R, C] int32
    masses: torch.Tensor  # [R, C] int64
    histogram: torch.Tensor  # [R, NUM_BINS] int32, starts at 0
    shortlist_lens: torch.Tensor  # [R] int32, starts at 0
    borders: torch.Tensor  # [R, 2] int32
    sure_masses: torch.Tensor  # [R, C] int64
    shortlist: torch.Tensor  # [R, V] float32
    thresholds: torch.Tensor  # [R] float32

    @classmethod
    def allocate(cls, rows: int, vocab_size: int, device: torch.device) -> _Scratch:
        num_chunks = triton.cdiv(vocab_size, CHUNK)
        zeros = torch.zeros(rows * (NUM_BINS + 1), dtype=torch.int32, device=device)
        return cls(
            best=torch.empty(rows, num_chunks, dtype=torch.float32, device=device),
            best_ids=torch.empty(rows, num_chunks, dtype=torch.int32, device=device),
            masses=torch.empty(rows, num_chunks, dtype=torch.int64, device=device),
            histogram=zeros[: rows * NUM_BINS].view(rows, NUM_BINS),
            shortlist_lens=zeros[rows * NUM_BINS :],  # aligned whatever R is: one compilation serves all
            borders=torch.empty(rows, 2, dtype=torch.int32, device=device),
            sure_masses=torch.empty(rows, num_chunks, dtype=torch.int64, device=device),
            shortlist=torch.empty(rows, vocab_size, dtype=torch.float32, device=device),
            thresholds=torch.empty(rows, dtype=torch.float32, device=device),
        )


def _check_logits(logits: torch.Tensor) -> Dims:
    dims = Dims()
    dims.check("logits", logits, ("R", "V"), torch.float32, logits.device)
    if not 0 < dims["V"] <= MAX_VOCAB_SIZE:
        raise InternalError(f"logits: V is {dims['V']}, expected 1 to {MAX_VOCAB_SIZE}")
    return dims


@triton.jit
def _best_kernel(logits, best, best_ids, row_stride, vocab_size, num_chunks, CHUNK: tl.constexpr):
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row * row_stride + columns, mask=columns < vocab_size, other=float("-inf"))
    value, index = first_best(values)
    tl.store(best + row * num_chunks + chunk, value)
    tl.store(best_ids + row * num_chunks + chunk, chunk * CHUNK + index)


@triton.jit
def _token_of_best(best, best_ids, row, num_chunks, CHUNKS: tl.constexpr):
    """The row's first best token, or -1 if its maximum is not finite."""
    value, chunk = best_of_chunks(best, row, num_chunks, CHUNKS)
    token_id = tl.load(best_ids + row * num_chunks + chunk).to(tl.int64)
    return tl.where(tl.abs(value) < float("inf"), token_id, -1)


@triton.jit
def _best_token_kernel(best, best_ids, token_ids, num_chunks, CHUNKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tl.store(token_ids + row, _token_of_best(best, best_ids, row, num_chunks, CHUNKS))


@triton.jit
def _weigh_kernel(
    logits, best, temperature, top_k, top_p, masses, histogram, row_stride, vocab_size, num_chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(temperature + row) > 0:
        cost = chunk_costs(logits, row_stride, best, temperature, row, chunk, vocab_size, num_chunks, CHUNK, CHUNKS)
        tl.store(masses + row * num_chunks + chunk, tl.sum(mass_of(cost), 0))
        if is_filtered(tl.load(top_k + row), tl.load(top_p + row), vocab_size):
            counts = tl.histogram(bin_of(cost), BINS, mask=cost < LAST_COST)
            bins = tl.arange(0, BINS)
            tl.atomic_add(histogram + row * BINS + bins, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _truncate_kernel(
    logits, best, temperature, thresholds, masses, row_stride, vocab_size, num_chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    threshold = tl.load(thresholds + row)
    if (threshold < LAST_COST) & (tl.load(temperature + row) > 0):
        cost = chunk_costs(logits, row_stride, best, temperature, row, chunk, vocab_size, num_chunks, CHUNK, CHUNKS)
        kept = tl.where(cost <= threshold, mass_of(cost), 0)
        tl.store(masses + row * num_chunks + chunk, tl.sum(kept, 0))


@triton.jit
def uniform_share(total, seed, output_index):
    """`floor(u * total)` for the row's uniform number u, a multiple of 2^-53, as in `engine.philox`: exact."""
    low, high = (output_index & 0xFFFFFFFF).to(tl.uint32), (output_index >> 32).to(tl.uint32)
    zero = tl.zeros((), tl.uint32)
    first, second, _, _ = tl.philox(seed, low, high, zero, zero)
    bits = ((first.to(tl.uint64) << 32) | second.to(tl.uint64)) >> 11
    return tl.umulhi(bits << 11, total.to(tl.uint64)).to(tl.int64)


@triton.jit
def _pick_kernel(
    logits, best, best_ids, temperature, thresholds, masses, seed, output_index, token_ids, row_stride,
    vocab_size, num_chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token_id = _token_of_best(best, best_ids, row, num_chunks, CHUNKS)
    if (token_id >= 0) & (tl.load(temperature + row) > 0):
        chunks = tl.arange(0, CHUNKS)
        weights = tl.load(masses + row * num_chunks + chunks, mask=chunks < num_chunks, other=0)
        target = uniform_share(tl.sum(weights, 0), tl.load(seed + row), tl.load(output_index + row))
        chunk = tl.sum((tl.cumsum(weights, 0) <= target).to(tl.int32), 0)
        target -= tl.sum(tl.where(chunks < chunk, weights, 0), 0)
        cost = chunk_costs(logits, row_stride, best, temperature, row, chunk, vocab_size, num_chunks, CHUNK, CHUNKS)
        kept = tl.where(cost <= tl.load(thresholds + row), mass_of(cost), 0)
        token_id = (chunk * CHUNK + tl.sum((tl.cumsum(kept, 0) <= target).to(tl.int32), 0)).to(tl.int64)
    tl.store(token_ids + row, token_id)
