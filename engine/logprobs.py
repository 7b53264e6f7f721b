"""Log-probabilities of rows of logits: of the tokens drawn from them, and of their best tokens.

Every result depends on its own row alone, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from engine.row_scan import chunk_masses, first_max, largest
from engine.upload import upload
from tandem.types import TokenId

Ranked: TypeAlias = tuple[tuple[TokenId, float], ...]
"""Tokens with their log-probabilities, best first."""

_TILE_ELEMENTS = 1 << 20
"""Size of the rows worked on at a time on a CPU: larger intermediates cost page faults, twice the time of the work."""


@dataclass(frozen=True, slots=True)
class BestTokens:
    """Best tokens of the plan's draws, with log-probabilities; k of each, on a device or on the host."""

    plan: LogprobPlan
    values: torch.Tensor
    """`[r, k]`, descending."""
    token_ids: torch.Tensor
    """`[r, k]` int64."""
    drawn: torch.Tensor | None = None
    """`[r]`: of the token that was drawn."""

    def fetch(self, to_host: Callable[[torch.Tensor], torch.Tensor]) -> BestTokens:
        """Returns a copy whose tensors `to_host` moved."""
        drawn = None if self.drawn is None else to_host(self.drawn)
        return BestTokens(self.plan, to_host(self.values), to_host(self.token_ids), drawn)

    def read(self) -> dict[int, tuple[float, Ranked]]:
        """By number of draw: the drawn token's log-probability (0 if not known), and the best, equal ones by id."""
        draws, counts = self.plan.draws, self.plan.counts
        drawn = [0.0] * len(draws) if self.drawn is None else self.drawn.tolist()
        token_ids, values = self.token_ids.numpy(), self.values.numpy()
        if (values[:, 1:] == values[:, :-1]).any():
            order = np.lexsort((token_ids, -values))  # [r, k], by row; the last key counts most
            token_ids, values = (np.take_along_axis(each, order, 1) for each in (token_ids, values))
        ranked = zip(draws, counts, drawn, token_ids.tolist(), values.tolist(), strict=True)
        return {
            number: (logprob, tuple(zip(ids[:count], best[:count], strict=True)))
            for number, count, logprob, ids, best in ranked
        }


@dataclass(frozen=True, slots=True)
class LogprobPlan:
    """Which draws want how many best tokens: r > 0 of them."""

    draws: tuple[int, ...]
    counts: tuple[int, ...]
    """How many of them each draw wants."""
    rows: torch.Tensor
    """`[r]` int64: the draws, on the logits' device."""

    @classmethod
    def of(cls, counts: Sequence[tuple[int, int]], device: torch.device) -> LogprobPlan | None:
        """Returns None for no `counts`, each with the number of its draw."""
        if not counts:
            return None
        draws, wanted = zip(*counts, strict=True)
        (rows,) = upload((np.array(draws, dtype=np.int64),), device)
        return cls(draws, wanted, rows)

    def of_drawn(self, logits: torch.Tensor, token_ids: torch.Tensor) -> BestTokens:
        """From raw logits `[D, V]` float32, and what was drawn from them, `[D]` int64 with -1 for broken rows."""
        own, values, indices = best_and_given(logits, token_ids, max(1, *self.counts), self.rows)
        return BestTokens(self, values, indices, own)


def best_and_given(
    logits: torch.Tensor, token_ids: torch.Tensor, count: int, rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of `token_ids` `[r]`, those of the best tokens `[r, k]`, descending, and their ids `[r, k]`.

    From `logits` `[r, V]` float32, which are overwritten; or from `rows` `[r]` of both, which stay as they are.
    `k` is `count`, or V if that is less.
    """
    parts = []
    for start, end in tiles(len(logits if rows is None else rows), logits):
        if rows is None:
            own, given_ids = logits[start:end], token_ids[start:end]
        else:
            own, given_ids = logits.index_select(0, rows[start:end]), token_ids[rows[start:end]]
        scores, log_mass = _log_probabilities(own)  # [r, V], [r, 1]
        given = scores.gather(1, given_ids[:, None].clamp(min=0))  # [r, 1]
        values, indices = largest(scores, min(count, logits.shape[1]))
        parts.append(((given - log_mass)[:, 0], values - log_mass, indices))
    given, values, indices = (torch.cat(each) for each in zip(*parts, strict=True))
    return given, values, indices


def best_tokens(scores: torch.Tensor, plan: LogprobPlan) -> BestTokens:
    """The best tokens of the plan's rows of `scores` `[D, V]` float32, which are log-probabilities already."""
    k = min(max(plan.counts), scores.shape[1])
    parts = [largest(scores.index_select(0, plan.rows[a:b]), k) for a, b in tiles(len(plan.draws), scores)]
    values, indices = (torch.cat(each) for each in zip(*parts, strict=True))
    return BestTokens(plan, values, indices)


def log_softmax_rows(logits: torch.Tensor, plan: LogprobPlan) -> None:
    """Replaces the plan's rows of `logits` `[D, V]` float32 by their log-probabilities; a broken row becomes NaN."""
    for start, end in tiles(len(plan.draws), logits):
        rows = plan.rows[start:end]
        scores, log_mass = _log_probabilities(logits.index_select(0, rows))
        logits.index_copy_(0, rows, scores.sub_(log_mass.to(torch.float32)))


def tiles(num_rows: int, logits: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Splits `num_rows` rows as wide as those of `logits` into parts that a cache holds; a GPU takes all at once."""
    size = max(1, num_rows if logits.is_cuda else _TILE_ELEMENTS // logits.shape[1])
    return ((start, min(start + size, num_rows)) for start in range(0, num_rows, size))


def _log_probabilities(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Subtracts the maximum of each of `scores` `[r, V]` in place; returns them and what is still to subtract.

    That is `[r, 1]` float64: the logarithm of their mass.
    """
    scores.sub_(first_max(scores)[0][:, None])
    return scores, chunk_masses(scores.exp())[:, -1:].log()
