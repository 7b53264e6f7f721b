"""The seqs of a step, where many of them only decode: those as columns, an object for each made only when asked for.

A decode computes a seq's newest token and draws the next one. Whoever plans steps keeps what it needs of each as a row
of a few arrays, which move on by one from step to step; `build_batch` reads them as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

from engine.step import Sampled, SampledToken, SampleSpec, ScheduledSeq
from tandem.types import BlockId, SamplingParams, TokenId

Ints = npt.NDArray[np.int64]
_LARGEST_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class DrawColumns:
    """Of B draws that depend on nothing but their logits, these values and their output index; arrays `[B]`."""

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float32]
    seed: Ints
    """64 bits."""

    def __getitem__(self, rows: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> DrawColumns:
        """These rows of it."""
        return DrawColumns(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.seed[rows]
        )

    def and_of(self, params: Sequence[SamplingParams]) -> DrawColumns:
        """These, and as many behind them."""
        seeds = np.array([each.seed & 0xFFFFFFFFFFFFFFFF for each in params], np.uint64).view(np.int64)
        return DrawColumns(
            np.append(self.temperature, np.array([each.temperature for each in params], np.float32)),
            np.append(self.top_k, np.array([min(each.top_k, _LARGEST_INT32) for each in params], np.int32)),
            np.append(self.top_p, np.array([each.top_p for each in params], np.float64)),
            np.append(self.min_p, np.array([each.min_p for each in params], np.float32)),
            np.append(self.seed, seeds),
        )


NO_DRAWS = DrawColumns(
    np.zeros(0, np.float32), np.zeros(0, np.int32), np.zeros(0), np.zeros(0, np.float32), np.zeros(0, np.int64)
)


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """B > 0 decodes of one step. The arrays are the step's own."""

    token_ids: Ints
    """`[B]`: each seq's newest token; 0 where it is fed."""
    context_lens: Ints
    """`[B]`: its position."""
    feeds: Ints | None
    """`[B]`: as `ScheduledSeq.feed`, -1 where the token is known; None = all are."""
    tables: npt.NDArray[np.int32]
    """`[B, W]`: each seq's blocks, -1 behind them; W is at least what this step reads or writes."""
    output_indexes: Ints
    """`[B]`: see `SampleSpec.output_index`."""
    specs: Sequence[SampleSpec]
    """B of them: the draws, but for their output index."""
    block_tables: Sequence[Sequence[BlockId]]
    """B of them: the seqs' own tables."""
    draws: DrawColumns | None
    """None if some draw depends on more."""

    def __len__(self) -> int:
        return len(self.specs)

    def sample_specs(self) -> tuple[SampleSpec, ...]:
        """The draws."""
        indexes = self.output_indexes.tolist()
        return tuple(
            [
                SampleSpec(each.params, index, each.history, 0, 0, None, each.fixed)
                for each, index in zip(self.specs, indexes, strict=True)
            ]
        )

    def scheduled(self) -> tuple[ScheduledSeq, ...]:
        """An object for each."""
        feeds = [-1] * len(self) if self.feeds is None else self.feeds.tolist()
        columns = zip(
            self.token_ids.tolist(),
            self.context_lens.tolist(),
            self.block_tables,
            self.sample_specs(),
            feeds,
            strict=True,
        )
        return tuple(
            ScheduledSeq((TokenId(token_id),), context_len, table, (spec,), feed if feed >= 0 else None)
            for token_id, context_len, table, spec, feed in columns
        )


class StepSeqs(Sequence[ScheduledSeq]):
    """`rows`, then `others`."""

    def __init__(self, rows: DecodeRows, others: tuple[ScheduledSeq, ...]) -> None:
        self.rows = rows
        self.others = others
        self._all: tuple[ScheduledSeq, ...] | None = None

    def __len__(self) -> int:
        return len(self.rows) + len(self.others)

    @overload
    def __getitem__(self, at: int) -> ScheduledSeq: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[ScheduledSeq, ...]: ...

    def __getitem__(self, at: int | slice) -> ScheduledSeq | tuple[ScheduledSeq, ...]:
        return self._each()[at]

    def __iter__(self) -> Iterator[ScheduledSeq]:
        return iter(self._each())

    def _each(self) -> tuple[ScheduledSeq, ...]:
        if self._all is None:
            self._all = (*self.rows.scheduled(), *self.others)
        return self._all


class DrawnTokens(Sequence[tuple[Sampled, ...]]):
    """What a step of decodes brought, if that is one token for each and nothing else."""

    def __init__(self, token_ids: Sequence[TokenId]) -> None:
        self.token_ids = token_ids

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, at: int) -> tuple[Sampled, ...]: ...

    @overload
    def __getitem__(self, at: slice) -> list[tuple[Sampled, ...]]: ...

    def __getitem__(self, at: int | slice) -> tuple[Sampled, ...] | list[tuple[Sampled, ...]]:
        if isinstance(at, slice):
            return [((SampledToken(each, None),),) for each in self.token_ids[at]]
        return ((SampledToken(self.token_ids[at], None),),)


def objects_of(seqs: Sequence[ScheduledSeq]) -> Sequence[ScheduledSeq]:
    """Those that are objects already: all, or all behind the rows."""
    return seqs.others if isinstance(seqs, StepSeqs) else seqs


def any_fed(seqs: Sequence[ScheduledSeq]) -> bool:
    """Whether any of them takes its input from the step before."""
    if isinstance(seqs, StepSeqs) and seqs.rows.feeds is not None:
        return True
    return any(seq.feed is not None for seq in objects_of(seqs))
