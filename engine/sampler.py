"""Draws tokens from rows of logits: a pure function of (logits, SampleSpec).

Order of work, as in vLLM and transformers:

 1. log-probabilities are taken from the raw logits                     `engine.logprobs`
 2. biases, penalties, min_tokens, then the mask                        `engine.penalties`
 3. temperature 0: the best token, the lowest index among equals; done
 4. temperature
 5. top-k, top-p, min-p                                                 `truncate`
 6. one uniform number per row, counter = output index                  `engine.philox`
 7. inverse of the cumulative distribution in the order of the vocabulary

Steps 3 to 7 are torch on any device, or the kernels' own `Sampler` where they have one. A draw of
candidates is transformers' beam search instead: step 2 changes the log-probabilities of the raw logits,
and the best of the result are taken; temperature and filters have no effect.

    plan_draws   any thread: everything that does not depend on the logits
    draw         queues the work; on a GPU nothing waits
    read         what was drawn, once it is on the host

Temperature, filters and seeds are columns of all draws; steps 1 and 2 are for those draws alone that ask for them.

Rows are worked on together but never look at each other: on a CPU a row's token is the same,
bit for bit, alone and in any batch. There is no state; any worker can draw any token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch

from engine.draws import DrawColumns, Draws, SampleSpec
from engine.logprobs import BestTokens, LogprobPlan, best_tokens, log_softmax_rows, tiles
from engine.penalties import LogitChanges, TokenMasks, changes_logits
from engine.philox import uniforms
from engine.row_scan import chunk_masses, first_max, inverse_cdf, largest
from engine.step import DrawnTokens, SampledToken
from engine.upload import upload
from kernels.operations import Kernels
from kernels.sampling import DrawParams, RowMaximum, Sampler
from tandem.types import TokenLogprobs

_MIN_TEMPERATURE = 1e-30
"""Below it float32 runs out of exponents; the draw is the best token well before."""
_NOT_FED: Mapping[int, int] = MappingProxyType({})
_NUCLEUS_GUESSES = (64, 1024)
"""How many best tokens are searched for a nucleus before the whole vocabulary is sorted."""


@dataclass(frozen=True, slots=True)
class _TorchDraws:
    """Arguments of steps 4 to 7 for the r rows that have a temperature."""

    columns: DrawColumns  # of r
    rows: torch.Tensor  # [r] int64
    divisors: torch.Tensor  # [r] float32
    targets: torch.Tensor  # [r] float64


@dataclass(frozen=True, slots=True)
class DrawPlan:
    """D draws, with all that can be known before their logits; tensors on the logits' device."""

    row_max: RowMaximum | None
    """Given if every draw wants the raw logits' maximum and nothing else; all below is None or empty then."""
    sampler: Sampler | None = None
    by_kernels: DrawParams | None = None
    """Given where a sampler draws and some draw has a temperature."""
    by_torch: _TorchDraws | None = None
    """Given where torch draws and some draw has a temperature."""
    changes: LogitChanges | None = None
    masks: TokenMasks | None = None
    logprobs: LogprobPlan | None = None
    candidates: LogprobPlan | None = None


@dataclass(frozen=True, slots=True)
class Drawn:
    """What D draws brought; on the logits' device, or on the host after `fetch`."""

    token_ids: torch.Tensor
    """`[D]` int64, -1 where the logits are broken; of candidates the best."""
    logprobs: BestTokens | None = None
    candidates: BestTokens | None = None

    def fetch(self, to_host: Callable[[torch.Tensor], torch.Tensor]) -> Drawn:
        """Returns a copy whose tensors `to_host` moved."""
        logprobs = None if self.logprobs is None else self.logprobs.fetch(to_host)
        candidates = None if self.candidates is None else self.candidates.fetch(to_host)
        return Drawn(to_host(self.token_ids), logprobs, candidates)

    def read(self) -> DrawnTokens:
        """Returns what is on the host."""
        token_ids = self.token_ids.tolist()
        more: dict[int, tuple[SampledToken, ...]] = {}
        for number, found in {} if self.logprobs is None else self.logprobs.read().items():
            more[number] = (SampledToken(token_ids[number], TokenLogprobs(token_ids[number], *found)),)
        for number, (_, top) in {} if self.candidates is None else self.candidates.read().items():
            # Fewer than asked for where a mask leaves fewer.
            candidates = (TokenLogprobs(*pair) for pair in top if pair[1] > -math.inf)
            more[number] = tuple(SampledToken(each.token_id, each) for each in candidates)
        return DrawnTokens(token_ids, more)


def plan_draws(draws: Draws, kernels: Kernels, device: torch.device, fed_by: Mapping[int, int] = _NOT_FED) -> DrawPlan:
    """What `draw` needs besides the logits, for D > 0 draws; uploads to `device`, and has read their histories then.

    `fed_by`: for each draw whose history lacks a token that is fed: which draw of the step before brings it.
    """
    columns = draws.columns
    extras, has_temperature = draws.extras, bool(columns.temperature.any())
    if kernels.row_max is not None and not has_temperature and not any(_needs_more(spec) for _, spec in extras):
        return DrawPlan(kernels.row_max)
    plan = DrawPlan(
        row_max=None,
        sampler=kernels.sampler,
        by_kernels=_draw_params(draws, device) if has_temperature and kernels.sampler is not None else None,
        by_torch=_torch_draws(draws, device) if has_temperature and kernels.sampler is None else None,
    )
    if not extras:
        return plan
    logprobs = [(n, spec.params.logprobs) for n, spec in extras if not spec.num_candidates]
    return replace(
        plan,
        changes=LogitChanges.of(extras, fed_by, device),
        masks=TokenMasks.of([(n, spec.mask) for n, spec in extras if spec.mask is not None], device),
        logprobs=LogprobPlan.of([(n, count) for n, count in logprobs if count is not None], device),
        candidates=LogprobPlan.of([(n, spec.num_candidates) for n, spec in extras if spec.num_candidates], device),
    )


def draw(
    logits: torch.Tensor, plan: DrawPlan, draw_rows: torch.Tensor | None = None, fed_ids: torch.Tensor | None = None
) -> Drawn:
    """Draws from `logits` `[R, V]`, of any floating-point dtype, which stay as they are.

    Draw i is from row `draw_rows[i]` (`[D]` int64), None = i. `fed_ids` `[D']` int64: what the step before drew, if
    the plan has draws fed by it. A row that holds NaN or has no finite maximum gives -1, and changes nothing for the
    others.
    """
    if plan.row_max is not None:
        token_ids = plan.row_max(logits)
        return Drawn(token_ids if draw_rows is None else token_ids[draw_rows])
    logits = logits.to(torch.float32)
    if draw_rows is not None:
        logits = logits.index_select(0, draw_rows)  # [D, V]
    adjusted = _adjusted(logits, plan, fed_ids)
    token_ids = _choose(adjusted, plan)
    return Drawn(
        token_ids,
        None if plan.logprobs is None else plan.logprobs.of_drawn(logits, token_ids),
        None if plan.candidates is None else best_tokens(adjusted, plan.candidates),
    )


def _needs_more(spec: SampleSpec) -> bool:
    """Whether the draw depends on more than its columns."""
    return spec.params.logprobs is not None or spec.mask is not None or spec.num_candidates > 0 or changes_logits(spec)


def _adjusted(logits: torch.Tensor, plan: DrawPlan, fed_ids: torch.Tensor | None) -> torch.Tensor:
    """Returns `[D, V]`: the logits themselves if no draw asks for a change, log-probabilities for candidates."""
    if plan.changes is None and plan.masks is None and plan.candidates is None:
        return logits
    logits = logits.clone()
    if plan.candidates is not None:
        log_softmax_rows(logits, plan.candidates)
    if plan.changes is not None:
        plan.changes.apply(logits, fed_ids)
    if plan.masks is not None:
        plan.masks.apply(logits)
    return logits


def _choose(logits: torch.Tensor, plan: DrawPlan) -> torch.Tensor:
    """Returns `[D]` int64: a token of each row, -1 where its maximum is not finite."""
    if plan.sampler is not None:
        draws = plan.by_kernels
        return plan.sampler.best_tokens(logits) if draws is None else plan.sampler.draw(logits, draws)
    best, chosen = first_max(logits)  # [D], [D]
    if plan.by_torch is not None:
        for start, end in tiles(len(plan.by_torch.rows), logits):
            _draw(logits, best, chosen, plan.by_torch, slice(start, end))
    return torch.where(best.abs() < torch.inf, chosen, -1)  # fewer launches than `isfinite`, which is four operations


def _draw_params(draws: Draws, device: torch.device) -> DrawParams:
    columns = draws.columns
    arrays = (columns.temperature, columns.top_k, columns.top_p, columns.min_p, columns.seed, draws.output_indexes)
    return DrawParams(*upload(arrays, device))


def _torch_draws(draws: Draws, device: torch.device) -> _TorchDraws:
    rows = np.flatnonzero(draws.columns.temperature > 0.0)
    columns = draws.columns.take(rows)
    divisors = np.maximum(columns.temperature, np.float32(_MIN_TEMPERATURE))
    numbers = uniforms(columns.seed.tolist(), draws.output_indexes[rows].tolist())
    return _TorchDraws(columns, *upload((rows, divisors, numbers), device))


def _draw(logits: torch.Tensor, best: torch.Tensor, chosen: torch.Tensor, draws: _TorchDraws, tile: slice) -> None:
    """Writes a token for each row of the tile into `chosen` `[D]`; `best` `[D]` are all rows' maxima.

    A row without a finite maximum gets any number.
    """
    rows = draws.rows[tile]
    scores = logits.index_select(0, rows)  # [r, V], a copy
    scores.sub_(best[rows, None]).div_(draws.divisors[tile, None])  # at most 0
    weights = scores.exp()
    masses = truncate(scores, weights, draws.columns.take(tile))
    chosen[rows] = inverse_cdf(weights, masses, draws.targets[tile])


def truncate(scores: torch.Tensor, weights: torch.Tensor, columns: DrawColumns) -> torch.Tensor:
    """Zeroes the weights of tokens that the filters remove, in place; returns `chunk_masses(weights)`.

    Each filter keeps the most probable tokens down to some score; equal scores stay or go together, so that
    nothing depends on the order in which a sort meets them. For distinct scores the kept sets are those of
    transformers, in its order: top-k, then top-p over what top-k left, then min-p.

    `scores` `[R, V]` float32 with maximum 0 in each row, `weights` = exp(scores).
    """
    vocab_size = scores.shape[1]
    threshold = scores.new_full((len(columns.top_k),), -torch.inf)  # [R]
    if by_k := np.flatnonzero((columns.top_k > 0) & (columns.top_k < vocab_size)).tolist():
        top_k = torch.from_numpy(columns.top_k[by_k]).to(scores.device, torch.int64)
        best, _ = largest(_take(scores, by_k), int(top_k.max()))
        threshold[by_k] = best.gather(1, top_k[:, None] - 1)[:, 0]
        _keep_from(weights, scores, threshold)
    masses = chunk_masses(weights)
    by_p = np.flatnonzero(columns.top_p < 1.0).tolist()
    by_min_p = np.flatnonzero(columns.min_p > 0.0).tolist()
    if not by_p and not by_min_p:
        return masses
    if by_p:
        top_p = torch.from_numpy(columns.top_p[by_p]).to(scores.device)
        threshold[by_p] = _nucleus_threshold(_take(scores, by_p), top_p * masses[by_p, -1])
    if by_min_p:
        min_p = torch.from_numpy(columns.min_p[by_min_p]).to(scores.device)
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
