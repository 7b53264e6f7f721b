"""Draws the next token of each row: a pure function of (logits, SampleSpec).

Order of work, as in vLLM and transformers:

 1. log-probabilities are taken from the raw logits
 2. penalties, biases, min_tokens          `engine.penalties`
 3. temperature 0: the best token, the lowest index among equals; done
 4. temperature
 5. top-k, top-p, min-p                    `engine.truncation`
 6. one uniform number per row             `engine.philox`, counter = (output index, choice)
 7. inverse of the cumulative distribution in the order of the vocabulary

Steps 3 to 7 are torch on any device, or the kernels' own `Sampler` where they have one.

Rows are worked on together but never look at each other: on a CPU a row's token is the same,
bit for bit, alone and in any batch. There is no state; any worker can draw any token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.penalties import adjust, changes_logits
from engine.philox import uniforms
from engine.row_scan import chunk_masses, first_max, inverse_cdf, largest
from engine.step import BrokenLogits, Sampled, SampledToken, SampleSpec
from engine.truncation import truncate
from engine.upload import upload
from kernels.operations import Kernels
from kernels.sampling import DrawParams, RowMaximum, Sampler
from tandem.types import TokenId, TokenLogprobs

_TILE_ELEMENTS = 1 << 20
"""Size of the rows worked on at a time on a CPU: larger intermediates cost page faults, twice the time of the work."""
_MIN_TEMPERATURE = 1e-30
"""Below it float32 runs out of exponents; the draw is the best token well before."""


@dataclass(frozen=True, slots=True)
class Draws:
    """What takes steps 3 to 7 off torch: kernels for all of them, or for the best token alone."""

    sampler: Sampler | None = None
    row_max: RowMaximum | None = None

    @classmethod
    def of(cls, kernels: Kernels) -> Draws:
        """Those that come with the kernels."""
        return cls(kernels.sampler, kernels.row_max)


TORCH_DRAWS = Draws()


def sample(logits: torch.Tensor, specs: Sequence[SampleSpec], draws: Draws = TORCH_DRAWS) -> list[Sampled]:
    """Returns one token per row of `logits` `[R, V]`, of any floating-point dtype; they stay as they are.

    A row that holds NaN or has no finite maximum gets BrokenLogits, and changes nothing for the others: nothing may
    be drawn from a broken computation.
    """
    if not specs:
        return []
    if draws.row_max is not None and all(map(_takes_best, specs)):
        return [_sampled(token_id, None) for token_id in _read(*draws.row_max(logits))]
    logits = logits.to(torch.float32)
    adjusted = _adjusted(logits, specs)
    token_ids = _choose(adjusted, specs) if draws.sampler is None else _draw_by(draws.sampler, adjusted, specs)
    logprobs = _logprobs(logits, token_ids, specs)
    return [_sampled(token_id, logprobs.get(row)) for row, token_id in enumerate(token_ids)]


def _sampled(token_id: int | None, logprobs: TokenLogprobs | None) -> Sampled:
    return BrokenLogits() if token_id is None else SampledToken(TokenId(token_id), logprobs)


def _adjusted(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    """Returns `[R, V]`: the logits themselves if no row asks for a change."""
    rows = [row for row, spec in enumerate(specs) if changes_logits(spec)]
    if not rows:
        return logits
    logits = logits.clone()
    for row in rows:
        adjust(logits[row], specs[row])
    return logits


def _choose(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[int | None]:
    best, chosen = first_max(logits)  # [R], [R]
    drawn = [row for row, spec in enumerate(specs) if spec.params.temperature > 0.0]
    for rows in _tiles(drawn, logits):
        _draw(logits, best, chosen, rows, [specs[row] for row in rows])
    return _read(best, chosen)


def _takes_best(spec: SampleSpec) -> bool:
    """Whether the raw logits' maximum is all that the row wants."""
    return spec.params.temperature == 0.0 and spec.params.logprobs is None and not changes_logits(spec)


def _read(best: torch.Tensor, chosen: torch.Tensor) -> list[int | None]:
    """The tokens `chosen` `[R]`; None where `best` `[R]`, the row's maximum, is not finite."""
    # Both come to the host together: each trip waits for a GPU. Both are exact in float64.
    maxima, token_ids = torch.stack((best.double(), chosen.double())).tolist()
    return [
        int(token_id) if math.isfinite(maximum) else None for maximum, token_id in zip(maxima, token_ids, strict=True)
    ]


def _draw_by(sampler: Sampler, logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[int | None]:
    if all(spec.params.temperature == 0.0 for spec in specs):
        drawn = sampler.best_tokens(logits)
    else:
        drawn = sampler.draw(logits, _draw_params(specs, logits))
    token_ids: list[int] = drawn.tolist()  # the step's one wait for the device
    return [token_id if token_id >= 0 else None for token_id in token_ids]


def _draw_params(specs: Sequence[SampleSpec], logits: torch.Tensor) -> DrawParams:
    vocab_size = logits.shape[1]
    params = [spec.params for spec in specs]
    return DrawParams(
        *upload(
            (
                np.array([p.temperature for p in params], dtype=np.float32),
                np.array([min(p.top_k, vocab_size) for p in params], dtype=np.int32),
                np.array([p.top_p for p in params], dtype=np.float64),
                np.array([p.min_p for p in params], dtype=np.float32),
                np.array([p.seed & 0xFFFFFFFFFFFFFFFF for p in params], dtype=np.uint64).view(np.int64),
                np.array([spec.choice_index for spec in specs], dtype=np.int64),
                np.array([spec.output_index for spec in specs], dtype=np.int64),
            ),
            logits.device,
        )
    )


def _draw(
    logits: torch.Tensor, best: torch.Tensor, chosen: torch.Tensor, rows: Sequence[int], specs: Sequence[SampleSpec]
) -> None:
    """Writes a token for each of `rows` of `logits` into `chosen` `[R]`; `best` `[R]` are all rows' maxima.

    A row without a finite maximum gets any number.
    """
    temperatures = [max(spec.params.temperature, _MIN_TEMPERATURE) for spec in specs]
    numbers = uniforms(
        [spec.params.seed for spec in specs],
        [spec.choice_index for spec in specs],
        [spec.output_index for spec in specs],
    )
    index, divisors, targets = upload(
        (np.array(rows, dtype=np.int64), np.array(temperatures, dtype=np.float32), numbers), logits.device
    )
    scores = logits.index_select(0, index)  # [r, V], a copy
    scores.sub_(best[index, None]).div_(divisors[:, None])  # at most 0
    weights = scores.exp()
    masses = truncate(scores, weights, [spec.params for spec in specs])
    chosen[index] = inverse_cdf(weights, masses, targets)


def _logprobs(
    logits: torch.Tensor, token_ids: list[int | None], specs: Sequence[SampleSpec]
) -> dict[int, TokenLogprobs]:
    """Returns, for each drawn row that wants them, the token's log-probability and the best ones'."""
    wanted = {
        row: token_id
        for row, (token_id, spec) in enumerate(zip(token_ids, specs, strict=True))
        if spec.params.logprobs is not None and token_id is not None
    }
    found: dict[int, TokenLogprobs] = {}
    for rows in _tiles(list(wanted), logits):
        scores = logits.index_select(0, torch.tensor(rows, device=logits.device))  # [r, V]
        scores.sub_(first_max(scores)[0][:, None])
        log_mass = chunk_masses(scores.exp())[:, -1:].log()  # [r, 1] float64
        drawn = torch.tensor([[wanted[row]] for row in rows], device=logits.device)
        drawn_logprobs = (scores.gather(1, drawn) - log_mass)[:, 0].tolist()
        counts = [specs[row].params.logprobs or 0 for row in rows]
        values, indices = largest(scores, min(max(1, *counts), scores.shape[1]))
        best = zip((values - log_mass).tolist(), indices.tolist(), strict=True)
        for row, count, logprob, (top, ids) in zip(rows, counts, drawn_logprobs, best, strict=True):
            found[row] = TokenLogprobs(TokenId(wanted[row]), logprob, _ranked(top, ids)[:count])
    return found


def _tiles(rows: list[int], logits: torch.Tensor) -> Iterator[list[int]]:
    size = max(1, len(rows) if logits.is_cuda else _TILE_ELEMENTS // logits.shape[1])
    return (rows[start : start + size] for start in range(0, len(rows), size))


def _ranked(logprobs: list[float], token_ids: list[int]) -> tuple[tuple[TokenId, float], ...]:
    """Descending; equal ones by id."""
    ranked = sorted(zip(token_ids, logprobs, strict=True), key=lambda pair: (-pair[1], pair[0]))
    return tuple((TokenId(token_id), logprob) for token_id, logprob in ranked)
