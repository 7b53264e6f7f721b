"""What a step draws: D draws as columns, and beside them, for the few that depend on more, a spec each.

    columns   temperature, filters and seed of every draw, and its output index
    extras    by number of draw: log-probabilities, penalties, bias, mask, candidates

Draws are numbered through the whole step: those of its rows first, then those of its chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from engine.history import Ints, TokenHistory
from tandem.types import SamplingParams

TokenMask: TypeAlias = npt.NDArray[np.uint32]
"""`[ceil(V / 32)]`: bit `t % 32` of word `t // 32` is set where token t may be drawn."""
_LARGEST_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class FixedChanges:
    """What a choice's parameters change in its logits in every step alike."""

    bias_ids: npt.NDArray[np.int64]
    biases: npt.NDArray[np.float32]
    """Biases of `bias_ids`."""
    end_ids: npt.NDArray[np.int64]
    """Not to be drawn before min_tokens."""


class SampleSpec(NamedTuple):
    """One draw, and everything that it depends on besides the logits.

    A tuple, since one is made per draw and step: that costs a third of a frozen dataclass.
    """

    params: SamplingParams
    """With the seed of the choice that draws."""
    output_index: int
    """Number of the token to draw within the completion, from 0: the generator's counter."""
    history: TokenHistory | None = None
    """Given only if `params` has a penalty; without the token that a feed brings, which is added where it is drawn.

    May be the seq's own: `launch` reads it before it returns.
    """
    num_candidates: int = 0
    """0 = one token is drawn as `params` say; k = the k best with their log-probabilities, best first (beam search).

    Fewer where the mask leaves fewer. As in transformers' beam search, biases, penalties and mask change the
    log-probabilities of the raw logits, which are not normalized again; temperature and filters have no effect.
    """
    mask: TokenMask | None = None
    """Tokens that may be drawn; None = all."""
    fixed: FixedChanges | None = None
    """Changes that `params` fix, if kept; None = made where needed."""


class DrawColumns(NamedTuple):
    """What does not change from one draw of a choice to the next; arrays `[D]`."""

    temperature: npt.NDArray[np.float32]
    """0 for the best token: of candidates too, which are put in its place."""
    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float32]
    seed: Ints
    """64 bits."""

    @classmethod
    def of(cls, specs: Sequence[SampleSpec]) -> DrawColumns:
        """Returns the draws of `specs`."""
        params = [spec.params for spec in specs]
        return cls(
            np.array([0.0 if spec.num_candidates else spec.params.temperature for spec in specs], np.float32),
            np.array([min(each.top_k, _LARGEST_INT32) for each in params], np.int32),
            np.array([each.top_p for each in params], np.float64),
            np.array([each.min_p for each in params], np.float32),
            np.array([each.seed & 0xFFFFFFFFFFFFFFFF for each in params], np.uint64).view(np.int64),
        )

    def take(self, rows: npt.NDArray[np.intp] | npt.NDArray[np.bool_] | slice) -> DrawColumns:
        """Returns these rows."""
        return DrawColumns(*[getattr(self, name)[rows] for name in self._fields])

    def joined(self, others: DrawColumns) -> DrawColumns:
        """Returns these rows, then the rows of the second argument."""
        return DrawColumns(*(np.append(getattr(self, name), getattr(others, name)) for name in self._fields))


@dataclass(frozen=True, slots=True)
class Draws:
    """D draws."""

    columns: DrawColumns
    output_indexes: Ints
    """`[D]`: see `SampleSpec.output_index`."""
    extras: tuple[tuple[int, SampleSpec], ...] = ()
    """Number and spec of every draw that may depend on more than columns, ascending."""

    def __len__(self) -> int:
        return len(self.output_indexes)

    @classmethod
    def of(cls, specs: Sequence[SampleSpec]) -> Draws:
        """Returns the draws of `specs`."""
        indexes = np.array([spec.output_index for spec in specs], np.int64)
        return cls(DrawColumns.of(specs), indexes, tuple(enumerate(specs)))

    def joined(self, others: Draws) -> Draws:
        """Returns its draws, then `others`."""
        behind = tuple((len(self) + number, spec) for number, spec in others.extras)
        indexes = np.append(self.output_indexes, others.output_indexes)
        return Draws(self.columns.joined(others.columns), indexes, self.extras + behind)
