"""Running requests that only decode, as columns: what nearly all of a batch do in nearly every step.

A request is here if it has a single choice, whose prompt is computed, that searches with no beams and follows no
grammar, and if it has taken part in a step as that. Its sequence keeps its own state, and nobody but this file moves it
on while it is here; what a plan asks of each of them lies in a row of a few arrays as well, so that per step and
sequence there is no more to do than to count. Only those whose last block is full are looked at one by one.

    settle     rows of requests that have gone are taken out, new ones put in
    wanted     how many blocks the next step takes
    schedule   the next step: all that can take part do

Holds no blocks: those are their sequences'.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import compress
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from decode_worker.scheduler import Beside
from engine.decode_rows import NO_DRAWS, DecodeRows, Ints
from engine.penalties import changes_logits_ever
from engine.prefix_cache import PrefixCache
from engine.sequence import Sequence
from engine.step import SampleSpec
from tandem.types import BlockId
from worker.request import Request

T = TypeVar("T")
_NUM_COLUMNS = 6
_COMPUTED, _LAST, _ROOM, _PROMPT, _DRAW, _STEP = range(_NUM_COLUMNS)
"""Tokens computed · at so many it is exhausted · token slots of its blocks · tokens of its prompt · number of its draw
in the step that it took part in last · number of that step."""


@dataclass(frozen=True, slots=True)
class _Joining:
    request: Request
    draw: int
    step: int


class Decoding:
    """Rows in the order in which their requests joined."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._pool = cache.pool
        self._num_steps = 0
        """Steps that were planned."""
        self._joining: dict[Request, _Joining] = {}
        self._rows: dict[Request, int] = {}
        self._has_gone: list[int] = []
        self._pairs: tuple[tuple[Request, Sequence], ...] = ()
        self._specs: tuple[SampleSpec, ...] = ()
        self._block_tables: tuple[SequenceOf[BlockId], ...] = ()
        self._draws = NO_DRAWS
        self._is_plain = np.zeros(0, np.bool_)
        """Whose draws `_draws` tell all of."""
        self._all_plain = True
        self._columns = np.zeros((_NUM_COLUMNS, 0), np.int64)
        self._tables = np.full((0, 1), -1, np.int32)

    def __contains__(self, request: Request) -> bool:
        return request in self._rows or request in self._joining

    def __len__(self) -> int:
        return len(self._rows) + len(self._joining)

    def __iter__(self) -> Iterator[Request]:
        yield from self._rows
        yield from self._joining

    def step_planned(self) -> int:
        """One more step is about to be launched; its number."""
        self._num_steps += 1
        return self._num_steps

    def join(self, request: Request, draw: int) -> None:
        """It takes part in the step planned last, as a decode, and is number `draw` of its draws."""
        self._joining[request] = _Joining(request, draw, self._num_steps)

    def leave(self, request: Request) -> None:
        """A no-op if it is not here."""
        self._joining.pop(request, None)
        row = self._rows.pop(request, None)
        if row is not None:
            self._has_gone.append(row)

    def clear(self) -> None:
        """Nobody is here."""
        for request in list(self):
            self.leave(request)

    def wanted(self) -> Beside | None:
        """What its next step takes; None if no sequence can step, or one must not write into its last block."""
        self._settle()
        columns = self._columns
        able = columns[_COMPUTED] < columns[_LAST]
        if not able.any():
            return None
        at_border = columns[_COMPUTED] >= columns[_ROOM]
        inside = np.flatnonzero(able & ~at_border)
        if self._pool.any_shared(self._written_blocks(inside)):
            return None
        return Beside(self._rows.keys(), int(np.count_nonzero(at_border & able)))

    def schedule(self, *, is_behind: bool) -> tuple[DecodeRows, tuple[tuple[Request, Sequence], ...]]:
        """Its share of the step planned last, right after `wanted`, and whose rows these are, in their order.

        `is_behind`: whether the step planned before that is in flight; no other one is. Takes the blocks (raises
        PoolExhausted) and moves the sequences on.
        """
        columns = self._columns
        able = columns[_COMPUTED] < columns[_LAST]
        rows = None if able.all() else np.flatnonzero(able)
        self._grow(np.flatnonzero(able & (columns[_COMPUTED] >= columns[_ROOM])))
        pairs, specs, tables = self._pairs, self._specs, self._block_tables
        if rows is not None:
            pairs, specs, tables = _of(pairs, able), _of(specs, able), _of(tables, able)
        here: slice | Ints = slice(None) if rows is None else rows
        context_lens = columns[_COMPUTED, here].copy()
        feeds: Ints | None = None
        if is_behind:
            feeds = np.where(columns[_STEP, here] == self._num_steps - 1, columns[_DRAW, here], -1)
            feeds = feeds if (feeds >= 0).any() else None
        newest = [seq.schedule_newest() for _, seq in pairs]
        token_ids = np.array(newest, np.int64)
        if feeds is not None:
            token_ids[feeds >= 0] = 0
        draws = (self._draws if rows is None else self._draws[rows]) if self._all_plain else None
        width = int(context_lens.max()) // self._pool.block_size + 1
        decode_rows = DecodeRows(
            token_ids=token_ids,
            context_lens=context_lens,
            feeds=feeds,
            tables=self._tables[here, :width].copy(),
            output_indexes=context_lens + 1 - columns[_PROMPT, here],
            specs=specs,
            block_tables=tables,
            draws=draws,
        )
        columns[_COMPUTED, here] += 1
        columns[_STEP, here] = self._num_steps
        columns[_DRAW, here] = np.arange(len(pairs))
        return decode_rows, pairs

    def _written_blocks(self, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        blocks: npt.NDArray[np.int32] = self._tables[rows, self._columns[_COMPUTED, rows] // self._pool.block_size]
        return blocks.astype(np.intp)

    def _grow(self, rows: npt.NDArray[np.intp]) -> None:
        """One more block for each of these rows."""
        if not len(rows):
            return
        blocks = self._cache.allocate(len(rows))
        places = self._columns[_ROOM, rows] // self._pool.block_size
        if places.max() >= self._tables.shape[1]:
            self._tables = _widened(self._tables, 2 * int(places.max()) + 2)
        self._tables[rows, places] = blocks
        self._columns[_ROOM, rows] += self._pool.block_size
        for row, block in zip(rows.tolist(), blocks, strict=True):
            self._pairs[row][1].add_blocks((block,))

    def _settle(self) -> None:
        if self._has_gone:
            stays = np.ones(len(self._pairs), np.bool_)
            stays[self._has_gone] = False
            self._has_gone.clear()
            self._pairs, self._specs = _of(self._pairs, stays), _of(self._specs, stays)
            self._block_tables = _of(self._block_tables, stays)
            self._columns, self._tables = self._columns[:, stays], self._tables[stays]
            self._draws, self._is_plain = self._draws[stays], self._is_plain[stays]
            self._changed()
        if self._joining:
            self._take_in(tuple(self._joining.values()))
            self._joining.clear()
            self._changed()

    def _take_in(self, joining: tuple[_Joining, ...]) -> None:
        pairs = tuple((each.request, each.request.group.prefix) for each in joining)
        size = self._pool.block_size
        columns = np.zeros((_NUM_COLUMNS, len(pairs)), np.int64)
        width = max(self._tables.shape[1], *(len(seq.block_table) for _, seq in pairs))
        tables = np.full((len(pairs), width), -1, np.int32)
        for row, (each, (_, seq)) in enumerate(zip(joining, pairs, strict=True)):
            last = seq.num_prompt_tokens + seq.params.max_tokens - 1
            room = len(seq.block_table) * size
            columns[:, row] = (seq.num_computed_tokens, last, room, seq.num_prompt_tokens, each.draw, each.step)
            tables[row, : len(seq.block_table)] = seq.block_table
        self._columns = np.concatenate((self._columns, columns), axis=1)
        self._tables = np.concatenate((_widened(self._tables, width), tables))
        self._pairs += pairs
        self._specs += tuple(seq.draw_spec() for _, seq in pairs)
        self._block_tables += tuple(seq.block_table for _, seq in pairs)
        params = [seq.params for _, seq in pairs]
        self._draws = self._draws.and_of(params)
        is_plain = [each.logprobs is None and not changes_logits_ever(each) for each in params]
        self._is_plain = np.concatenate((self._is_plain, np.array(is_plain, np.bool_)))

    def _changed(self) -> None:
        self._rows = {request: row for row, (request, _) in enumerate(self._pairs)}
        self._all_plain = bool(self._is_plain.all())


def may_join(request: Request) -> bool:
    """Whether its sequence, once it has taken part in a step as a decode, needs no more than columns tell."""
    group = request.group
    return (
        len(group.sequences) == 1 and group.is_forked and not group.prefix.num_candidates and group.prefix.guide is None
    )


def _of(rows: tuple[T, ...], chosen: npt.NDArray[np.bool_]) -> tuple[T, ...]:
    return tuple(compress(rows, chosen))


def _widened(tables: npt.NDArray[np.int32], width: int) -> npt.NDArray[np.int32]:
    if width <= tables.shape[1]:
        return tables
    wider = np.full((len(tables), width), -1, np.int32)
    wider[:, : tables.shape[1]] = tables
    return wider
