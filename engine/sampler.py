"""Draws the next token of each row: a pure function of (logits, SampleSpec).

Order of work, as in vLLM and transformers:

 1. log-probabilities are taken from the raw logits
 2. penalties, biases, min_tokens          `engine.penalties`
 3. temperature 0: the best token, the lowest index among equals; done
 4. temperature
 5. top-k, top-p, min-p                    `engine.truncation`
 6. one uniform number per row             `engine.philox`, counter = (output index, choice)
 7. inverse of the cumulative distribution in the order of the vocabulary

Rows are worked on together but never look at each other: on a CPU a row's token is the same,
bit for bit, alone and in any batch. There is no state; any worker can draw any token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.penalties import adjust, changes_logits
from engine.philox import uniforms
from engine.row_scan import first_max, inverse_cdf, largest
from engine.step import SampledToken, SampleSpec
from engine.truncation import truncate
from tandem.errors import InternalError
from tandem.types import TokenId, TokenLogprobs

_MIN_TEMPERATURE = 1e-30
"""Below it float32 runs out of exponents; the draw is the best token well before."""


def sample(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[SampledToken]:
    """Returns one token per row of `logits` `[R, V]` float32, which stay as they are.

    Raises InternalError if a row holds NaN or has no finite maximum: nothing may be drawn from
    a broken computation.
    """
    if not specs:
        return []
    token_ids = _choose(_adjusted(logits, specs), specs)
    if all(spec.params.logprobs is None for spec in specs):
        return [SampledToken(TokenId(token_id), None) for token_id in token_ids]
    logprobs = _logprobs(logits, token_ids, specs)
    return [SampledToken(TokenId(token_id), logprobs.get(row)) for row, token_id in enumerate(token_ids)]


def _adjusted(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    """Returns `[R, V]`: the logits themselves if no row asks for a change."""
    rows = [row for row, spec in enumerate(specs) if changes_logits(spec)]
    if not rows:
        return logits
    logits = logits.clone()
    for row in rows:
        adjust(logits[row], specs[row])
    return logits


def _choose(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[int]:
    best, best_id = first_max(logits)  # [R], [R]
    if not bool(torch.isfinite(best).all()):
        bad = (~torch.isfinite(best)).nonzero()[:, 0].tolist()
        raise InternalError(f"logits of rows {bad} are not finite")
    token_ids: list[int] = best_id.tolist()
    drawn = [row for row, spec in enumerate(specs) if spec.params.temperature > 0.0]
    if drawn:
        every = len(drawn) == len(specs)
        rows, top = (logits, best) if every else (logits[drawn], best[drawn])
        for row, token_id in zip(drawn, _draw(rows, top, [specs[row] for row in drawn]), strict=True):
            token_ids[row] = token_id
    return token_ids


def _draw(logits: torch.Tensor, best: torch.Tensor, specs: Sequence[SampleSpec]) -> list[int]:
    temperatures = torch.tensor([max(spec.params.temperature, _MIN_TEMPERATURE) for spec in specs])
    scores = (logits - best[:, None]).div_(temperatures.to(logits.device)[:, None])  # [R, V], at most 0
    weights = scores.exp()
    masses = truncate(scores, weights, [spec.params for spec in specs])
    numbers = uniforms(
        [spec.params.seed for spec in specs],
        [spec.choice_index for spec in specs],
        [spec.output_index for spec in specs],
    )
    token_ids: list[int] = inverse_cdf(weights, masses, torch.from_numpy(numbers).to(logits.device)).tolist()
    return token_ids


def _logprobs(logits: torch.Tensor, token_ids: list[int], specs: Sequence[SampleSpec]) -> dict[int, TokenLogprobs]:
    """Returns, for each row that wants them, the drawn token's log-probability and the best ones'."""
    wanted = {row: spec.params.logprobs for row, spec in enumerate(specs) if spec.params.logprobs is not None}
    rows = list(wanted)
    all_logprobs = logits[rows].log_softmax(-1)  # [r, V]
    drawn = torch.tensor([token_ids[row] for row in rows], device=logits.device)
    drawn_logprobs = all_logprobs.gather(1, drawn[:, None])[:, 0].tolist()
    values, indices = largest(all_logprobs, min(max(1, *wanted.values()), logits.shape[1]))
    found = zip(rows, drawn_logprobs, values.tolist(), indices.tolist(), strict=True)
    return {
        row: TokenLogprobs(TokenId(token_ids[row]), logprob, _ranked(best, ids)[: wanted[row]])
        for row, logprob, best, ids in found
    }


def _ranked(logprobs: list[float], token_ids: list[int]) -> tuple[tuple[TokenId, float], ...]:
    """Descending; equal ones by id."""
    ranked = sorted(zip(token_ids, logprobs, strict=True), key=lambda pair: (-pair[1], pair[0]))
    return tuple((TokenId(token_id), logprob) for token_id, logprob in ranked)
