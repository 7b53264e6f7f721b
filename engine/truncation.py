"""top-k, top-p and min-p as one threshold on the score of each row.

Each filter keeps the most probable tokens down to some score; equal scores stay or go
together, so that nothing depends on the order in which a sort meets them. For distinct
scores the kept sets are those of the transformers library, in its order: top-k, then top-p
over what top-k left, then min-p.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.row_scan import chunk_masses, largest
from tandem.types import SamplingParams

_NUCLEUS_GUESSES = (64, 1024)
"""A nucleus is looked for among so many best tokens before the whole vocabulary is sorted."""


def truncate(scores: torch.Tensor, weights: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Zeroes the weights of tokens that the filters remove, in place; returns `chunk_masses(weights)`.

    `scores` `[R, V]` float32 with maximum 0 in each row, `weights` = exp(scores).
    """
    vocab_size = scores.shape[1]
    threshold = scores.new_full((len(params),), -torch.inf)  # [R]
    if by_k := [row for row, p in enumerate(params) if 0 < p.top_k < vocab_size]:
        top_k = torch.tensor([params[row].top_k for row in by_k], device=scores.device)
        best, _ = largest(_take(scores, by_k), int(top_k.max()))
        threshold[by_k] = best.gather(1, top_k[:, None] - 1)[:, 0]
        _keep_from(weights, scores, threshold)
    masses = chunk_masses(weights)
    by_p = [row for row, p in enumerate(params) if p.top_p < 1.0]
    by_min_p = [row for row, p in enumerate(params) if p.min_p > 0.0]
    if not by_p and not by_min_p:
        return masses
    if by_p:
        top_p = torch.tensor([params[row].top_p for row in by_p], dtype=torch.float64, device=scores.device)
        threshold[by_p] = _nucleus_threshold(_take(scores, by_p), top_p * masses[by_p, -1])
    if by_min_p:
        min_p = torch.tensor([params[row].min_p for row in by_min_p], device=scores.device)
        threshold[by_min_p] = torch.maximum(threshold[by_min_p], min_p.log())  # the best weight is exp(0)
    _keep_from(weights, scores, threshold)
    return chunk_masses(weights)


def _nucleus_threshold(scores: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Returns `[R]`: the lowest score of the smallest set of best tokens that has at least `mass`.

    `mass` `[R]` is float64. Where top-k left fewer tokens, `mass` is less than theirs, so the
    nucleus lies within them; a token that rounding adds has weight 0 already.
    """
    vocab_size = scores.shape[1]
    lowest = scores.new_empty(len(scores))
    open_rows = torch.arange(len(scores), device=scores.device)
    for width in (*_NUCLEUS_GUESSES, vocab_size):
        best, _ = largest(scores.index_select(0, open_rows), min(width, vocab_size))  # [r, width], descending
        weights = best.exp()
        before = weights.cumsum(-1, dtype=torch.float64) - weights  # [r, width] mass of all better tokens
        num_kept = (before < mass[open_rows, None]).sum(-1).clamp_(min=1)  # [r]
        lowest[open_rows] = best.gather(1, num_kept[:, None] - 1)[:, 0]
        open_rows = open_rows[num_kept == best.shape[1]] if width < vocab_size else open_rows[:0]
        if not len(open_rows):
            break
    return lowest


def _keep_from(weights: torch.Tensor, scores: torch.Tensor, threshold: torch.Tensor) -> None:
    # A float mask: on a CPU torch compares into bool, and multiplies by it, ten times slower.
    weights.mul_(torch.ge(scores, threshold[:, None], out=torch.empty_like(scores)))


def _take(rows: torch.Tensor, indices: list[int]) -> torch.Tensor:
    if len(indices) == len(rows):
        return rows
    return rows.index_select(0, torch.tensor(indices, device=rows.device))
