"""Choices that decode, as rows of a few arrays: the only form that a decode has, from plan to wire.

A choice enters with the first step that computes its newest token and draws the next one. Its sequence keeps its own
state, and nobody but this file moves it on while it is here; what a plan asks of it lies in its row as well, so that
per step and choice there is little more to do than to count. One by one are looked at only: rows whose last block is
full or shared, rows that wait for the host between two draws (grammars, beams), and draws that depend on more than
columns, each of which has a spec in the step's `extras`.

A request of which every running choice is here is *whole*: all its rows take part in the next step, if they can. Other
rows take part where a plan names them.

    wanted     which whole requests step next, and how many blocks that takes
    schedule   rows of the next step: those of `wanted`, those that a plan names, or both
    leave …    takes rows out

Holds no blocks: those are their sequences'.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from itertools import compress

import numpy as np
import numpy.typing as npt

from decode_worker.scheduler import Beside
from engine.draws import DrawColumns, Draws, SampleSpec
from engine.history import Ints
from engine.penalties import changes_logits_ever
from engine.prefix_cache import PrefixCache
from engine.sequence import Sequence
from engine.step import BlockCopy, DecodeRows
from tandem.errors import InternalError
from worker.request import Request
from worker.source import Pair

_NUM_COLUMNS = 6
_COMPUTED, _LAST, _ROOM, _PROMPT, _DRAW, _STEP = range(_NUM_COLUMNS)
"""Tokens computed · their number at which the choice is exhausted · token slots of its blocks · tokens of its prompt ·
number of its draw in the step that it took part in last · number of that step."""


class Decoding:
    """Rows in the order in which their choices entered."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._pool = cache.pool
        self._num_steps = 0
        """Steps that were planned."""
        self._pairs: tuple[Pair, ...] = ()
        self._is_plain: tuple[bool, ...] = ()
        self._rows: dict[Sequence, int] = {}
        self._of: dict[Request, list[int]] = {}
        self._whole: dict[Request, int] = {}
        """Seats of each."""
        self._waiting: list[int] = []
        """Rows that may not step while their last token is pending, since the host must see it first."""
        self._others: list[int] = []
        """Rows whose draws depend on more than columns."""
        self._has_gone: list[int] = []
        self._draws = DrawColumns.of(())
        self._columns = np.zeros((_NUM_COLUMNS, 0), np.int64)
        self._tables = np.full((0, 1), -1, np.int32)
        self._able = np.zeros(0, np.bool_)
        """Rows that can step, as `wanted` found them last; so are the rows that are about to write into a shared block.
        """
        self._sharing: list[int] = []

    @property
    def num_whole(self) -> int:
        """Returns the number of whole requests."""
        return len(self._whole)

    def __contains__(self, request: Request) -> bool:
        """Whether the request is whole."""
        return request in self._whole

    def steps(self, request: Request) -> bool:
        """Whether a choice of the request took part in the newest step."""
        return bool((self._columns[_STEP, self._of.get(request, [])] == self._num_steps).any())

    def leave(self, request: Request) -> None:
        """Takes all rows of a request out. A no-op if it has none."""
        self._has_gone += self._of.pop(request, ())
        self._whole.pop(request, None)

    def choice_left(self, request: Request, choice: Sequence) -> None:
        """Takes the row of one choice out. A no-op if it has none."""
        if choice in self._rows and request in self._of:
            row = self._rows.pop(choice)
            self._of[request].remove(row)
            self._has_gone.append(row)

    def beams_moved(self, request: Request) -> None:
        """Takes out the rows of beams that nobody continued; those that are new have none yet."""
        sequences = set(request.group.sequences)
        for row in tuple(self._of.get(request, ())):
            if self._pairs[row][1] not in sequences:
                self.choice_left(request, self._pairs[row][1])
        if len(self._of.get(request, ())) < len(sequences):
            self._whole.pop(request, None)

    def wanted(self) -> Beside | None:
        """Returns what the rows of whole requests take in their next step; None if none of them can step."""
        self._settle()
        columns = self._columns
        able = columns[_COMPUTED] < columns[_LAST]
        for row in self._waiting:
            _, seq = self._pairs[row]
            able[row] &= not seq.num_pending_tokens and not seq.awaits_mask
        if len(self._whole) < len(self._of):
            for request, rows in self._of.items():
                able[rows] &= request in self._whole
        self._able = able
        if not able.any():
            return None
        is_full = columns[_COMPUTED] >= columns[_ROOM]
        inside = np.flatnonzero(able & ~is_full)
        self._sharing = inside[self._pool.shared(self._written_blocks(inside))].tolist()
        num_blocks = int(np.count_nonzero(able & is_full)) + len(self._sharing)
        return Beside(self._whole.keys(), sum(self._whole.values()), num_blocks)

    def schedule(
        self, planned: SequenceOf[Pair], *, beside: bool, is_behind: bool
    ) -> tuple[DecodeRows | None, tuple[Pair, ...], list[BlockCopy]]:
        """Returns the rows of a step that is about to be launched, whose rows these are, and the copies before it.

        Those are `planned`, which may be new, and with `beside`, right after `wanted`, what that named.
        `is_behind`: whether the step planned before is in flight; no other one is. Takes the blocks (raises
        PoolExhausted) and moves the sequences on.
        """
        self._num_steps += 1
        self._settle()
        sharing = self._sharing if beside else []
        chosen = self._able if beside else np.zeros(len(self._pairs), np.bool_)
        if planned:
            self._take_in([pair for pair in planned if pair[1] not in self._rows])
            chosen = np.append(chosen, np.zeros(len(self._pairs) - len(chosen), np.bool_))
            named = [self._rows[seq] for _, seq in planned]
            chosen[named] = True
            sharing = sharing + named
        if not chosen.any():
            return None, (), []
        copies = [copy for row in sharing for copy in self._own_last_block(row)]
        self._grow(np.flatnonzero(chosen & (self._columns[_COMPUTED] >= self._columns[_ROOM])))
        if chosen.all():
            return self._moved_on(slice(None), self._others, self._pairs, is_behind=is_behind), self._pairs, copies
        numbers = np.cumsum(chosen) - 1
        others = [int(numbers[row]) for row in self._others if chosen[row]]
        pairs = tuple(compress(self._pairs, chosen))
        return self._moved_on(np.flatnonzero(chosen), others, pairs, is_behind=is_behind), pairs, copies

    def _moved_on(
        self, rows: Ints | slice, others: list[int], pairs: tuple[Pair, ...], *, is_behind: bool
    ) -> DecodeRows:
        """Moves the sequences of `rows` on by a token each, and returns the step's arrays.

        `others`: numbers among them of those in `_others`.
        """
        columns, size = self._columns, self._pool.block_size
        context_lens = columns[_COMPUTED, rows].copy()
        output_indexes = context_lens + 1 - columns[_PROMPT, rows]
        indexes = output_indexes.tolist() if others else ()
        extras = tuple([(number, pairs[number][1].draw_spec(indexes[number])) for number in others])
        token_ids = np.array([seq.schedule_newest() for _, seq in pairs], np.int64)
        feeds: Ints | None = None
        if is_behind:
            feeds = np.where(columns[_STEP, rows] == self._num_steps - 1, columns[_DRAW, rows], -1)
            feeds = feeds if (feeds >= 0).any() else None
        if feeds is not None:
            token_ids[feeds >= 0] = 0
        width = int(context_lens.max()) // size + 1
        columns[_COMPUTED, rows] += 1
        columns[_STEP, rows] = self._num_steps
        columns[_DRAW, rows] = np.arange(len(pairs))
        draws = Draws(self._draws if isinstance(rows, slice) else self._draws.take(rows), output_indexes, extras)
        return DecodeRows(token_ids, context_lens, self._tables[rows, :width].copy(), draws, feeds)

    def _written_blocks(self, rows: Ints) -> npt.NDArray[np.intp]:
        blocks: npt.NDArray[np.int32] = self._tables[rows, self._columns[_COMPUTED, rows] // self._pool.block_size]
        return blocks.astype(np.intp)

    def _own_last_block(self, row: int) -> tuple[BlockCopy, ...]:
        request, seq = self._pairs[row]
        copies = request.group.copy_on_write(seq, self._cache)
        for copy in copies:
            self._tables[row, self._columns[_COMPUTED, row] // self._pool.block_size] = copy.target
        return copies

    def _grow(self, rows: npt.NDArray[np.intp]) -> None:
        """Adds a block to each of these rows."""
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
            self._pairs = tuple(compress(self._pairs, stays))
            self._is_plain = tuple(compress(self._is_plain, stays))
            self._columns, self._tables = self._columns[:, stays], self._tables[stays]
            self._draws = self._draws.take(stays)
            self._changed()

    def _take_in(self, pairs: list[Pair]) -> None:
        if not pairs:
            return
        if any(seq.num_pending_tokens for _, seq in pairs):
            raise InternalError("a choice enters while its last token is pending")
        size, seqs = self._pool.block_size, [seq for _, seq in pairs]
        width = max(self._tables.shape[1], *(len(seq.block_table) for seq in seqs))
        tables = np.full((len(pairs), width), -1, np.int32)
        columns = np.zeros((_NUM_COLUMNS, len(pairs)), np.int64)
        for row, seq in enumerate(seqs):
            last = seq.num_prompt_tokens + seq.params.max_tokens - 1
            room = len(seq.block_table) * size
            columns[:, row] = (seq.num_computed_tokens, last, room, seq.num_prompt_tokens, 0, 0)
            tables[row, : len(seq.block_table)] = seq.block_table
        self._columns = np.concatenate((self._columns, columns), axis=1)
        self._tables = np.concatenate((_widened(self._tables, width), tables))
        specs = [SampleSpec(seq.params, 0, num_candidates=seq.num_candidates) for seq in seqs]
        self._draws = self._draws.joined(DrawColumns.of(specs))
        self._pairs += tuple(pairs)
        self._is_plain += tuple([_is_plain(seq) for seq in seqs])
        self._changed()

    def _changed(self) -> None:
        self._rows = {seq: row for row, (_, seq) in enumerate(self._pairs)}
        self._waiting = [row for row, (_, seq) in enumerate(self._pairs) if not seq.runs_ahead]
        self._others = [row for row, is_plain in enumerate(self._is_plain) if not is_plain]
        self._of = {}
        for row, (request, _) in enumerate(self._pairs):
            self._of.setdefault(request, []).append(row)
        self._whole = {
            request: request.group.num_seats if request.spec.sampling.beam_width else len(rows)
            for request, rows in self._of.items()
            if len(rows) == len(request.group.sequences) or len(rows) == len(request.group.running)
        }


def _is_plain(seq: Sequence) -> bool:
    """Whether the sequence's draws depend on columns alone."""
    params = seq.params
    return params.logprobs is None and not changes_logits_ever(params) and not seq.num_candidates and seq.guide is None


def _widened(tables: npt.NDArray[np.int32], width: int) -> npt.NDArray[np.int32]:
    if width <= tables.shape[1]:
        return tables
    wider = np.full((len(tables), width), -1, np.int32)
    wider[:, : tables.shape[1]] = tables
    return wider
