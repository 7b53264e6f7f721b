"""Log-probabilities of a prompt's own tokens: which are still to be told, and how a step computes them.

The logits at one token of a prompt score the next one, also across the border of two chunks: the next token is known.
The first token follows nothing and has no log-probability. All rows of a chunk at once may be more logits than memory
holds, so last hidden states are projected a tile at a time, and of each tile only the best are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.logprobs import BestTokens, LogprobPlan, best_and_given
from engine.step import BrokenLogits, ScheduledSeq, ScoredTokens, Scores
from engine.upload import upload
from tandem.errors import InternalError
from tandem.token_ids import TokenIds
from tandem.types import TokenId, TokenLogprobs

_TILE_ROWS = 64
"""Rows of logits that exist at a time: 38 MB of float32 for a vocabulary of 150,000."""


class PromptScores:
    """How far the log-probabilities of a prompt's tokens have been sent."""

    def __init__(self, prompt_token_ids: tuple[TokenId, ...] | TokenIds, num_top: int) -> None:
        self._prompt_token_ids = prompt_token_ids
        self._num_top = num_top
        self._next = 1

    def of_chunk(self, start: int, end: int) -> ScoredTokens | None:
        """Returns what a step that computes the tokens `[start, end)` is to score; None if all was sent. Raises
        InternalError if tokens before were not computed: their logits would be missing.
        """
        first, last = max(start + 1, self._next), min(end, len(self._prompt_token_ids) - 1)
        if first > last:
            return None
        if first > self._next:
            raise InternalError(f"prompt tokens {self._next}..{first - 1} are to be scored and were not computed")
        return ScoredTokens(self._prompt_token_ids[first : last + 1], first - 1 - start, self._num_top)

    def take(self, num_tokens: int) -> int:
        """Notes that `num_tokens` more are sent now; returns the index of the first within the prompt."""
        first, self._next = self._next, self._next + num_tokens
        return first


class ScoreLayout(NamedTuple):
    """S > 0 known tokens that a step of T tokens scores, on the host."""

    seqs: tuple[tuple[int, int], ...]
    """See `ScorePlan`, as for all but the counts."""
    counts: tuple[int, ...]
    """How many of the best tokens are wanted for each."""
    rows: npt.NDArray[np.int64]
    """`[S]`: indices into U."""
    token_ids: npt.NDArray[np.int64]
    hidden_rows: npt.NDArray[np.int64]
    sample_rows: npt.NDArray[np.int64]

    @classmethod
    def of(
        cls, chunks: Sequence[ScheduledSeq], starts: npt.NDArray[np.int32], sample_rows: npt.NDArray[np.int64]
    ) -> ScoreLayout | None:
        """Returns None if no chunk has tokens to score. `starts` of the chunks and `sample_rows` `[R]` index into T."""
        wanted = [(number, chunk.scored) for number, chunk in enumerate(chunks) if chunk.scored is not None]
        if not wanted:
            return None
        rows = np.concatenate([starts[n] + each.first_row + np.arange(len(each.token_ids)) for n, each in wanted])
        hidden_rows = np.union1d(rows, sample_rows).astype(np.int64)
        return cls(
            tuple((number, len(each.token_ids)) for number, each in wanted),
            tuple(each.num_top for _, each in wanted for _ in each.token_ids),
            np.searchsorted(hidden_rows, rows).astype(np.int64),
            np.array([token_id for _, each in wanted for token_id in each.token_ids], dtype=np.int64),
            hidden_rows,
            np.searchsorted(hidden_rows, sample_rows).astype(np.int64),
        )

    def placed(self, device: torch.device) -> ScorePlan:
        """Returns the plan on `device`."""
        at, *others = upload((self.rows, self.token_ids, self.hidden_rows, self.sample_rows), device)
        return ScorePlan(self.seqs, LogprobPlan(tuple(range(len(self.counts))), self.counts, at), *others)


@dataclass(frozen=True, slots=True)
class ScorePlan:
    """S > 0 known tokens that a step of T tokens scores, and the rows that it needs for that and for its draws."""

    seqs: tuple[tuple[int, int], ...]
    """Number of each chunk that has any, and how many."""
    best: LogprobPlan
    """Its rows `[S]` index into U."""
    token_ids: torch.Tensor
    """`[S]` int64: the known tokens."""
    hidden_rows: torch.Tensor
    """`[U]` int64, ascending: indices into T."""
    sample_rows: torch.Tensor
    """`[R]` int64: the rows that are drawn from, as indices into U."""

    def score(self, hidden: torch.Tensor, project: Callable[[torch.Tensor], torch.Tensor]) -> BestTokens:
        """From last hidden states `[U, E]`, which `project` turns into logits."""
        rows, parts = self.best.rows, []
        for tile in score_tiles(len(rows)):
            logits = project(hidden.index_select(0, rows[tile])).to(torch.float32)  # [r, V]
            parts.append(best_and_given(logits, self.token_ids[tile], max(1, *self.best.counts)))
        own, values, indices = (torch.cat(each) for each in zip(*parts, strict=True))
        return BestTokens(self.best, values, indices, own)

    def read(self, best: BestTokens) -> dict[int, Scores]:
        """Returns scores by number of chunk, once `best` is on the host."""
        found, token_ids = best.read(), self.token_ids.tolist()
        scores: dict[int, Scores] = {}
        start = 0
        for number, count in self.seqs:
            span = range(start, start + count)
            logprobs = tuple(TokenLogprobs(token_ids[row], *found[row]) for row in span)
            is_broken = any(each.logprob != each.logprob for each in logprobs)  # NaN
            scores[number] = BrokenLogits() if is_broken else logprobs
            start += count
        return scores


def score_tiles(num_rows: int) -> Iterator[slice]:
    """Yields the rows that are projected at a time."""
    return (slice(start, start + _TILE_ROWS) for start in range(0, num_rows, _TILE_ROWS))
