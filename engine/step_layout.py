"""One step's arrays from its rows and chunks: pure numpy, which `engine.batch` places on a device.

    seqs     │ row 0 │ row 1 │ … │ chunk 0 │ chunk 1 │ …        B of them
    tokens   │   1   │   1   │   │  k ≥ 1  │         │          T
    draws    │   1   │   1   │   │  d ≥ 0  │         │          D, from R rows of logits

Cheap, since it runs every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from engine.draws import Draws
from engine.graph_shapes import GraphShape
from engine.history import Ints
from engine.penalties import reads_output
from engine.prompt_scores import ScoreLayout
from engine.step import DecodeRows, ScheduledSeq
from engine.upload import Array
from tandem.errors import InternalError

_NO_INTS: Ints = np.zeros(0, np.int64)

ShapeOf: TypeAlias = Callable[[int, int, int, int], GraphShape | None]
"""By tokens, seqs, rows of logits and longest seq of a step: the graph that serves the step."""


class Part(NamedTuple):
    """The rows or the chunks of a step, or both, laid end to end: B seqs, T tokens, R rows of logits."""

    token_ids: Ints  # [T]
    positions: Ints  # [T]
    slots: Ints  # [T]
    query_lens: tuple[int, ...]  # B of them
    starts: npt.NDArray[np.int32]  # [B + 1], the seqs' first tokens, and T
    seq_lens: Ints  # [B]
    tables: npt.NDArray[np.int32]  # [B, W], -1 behind each seq's blocks
    sample_rows: Ints  # [R]
    draw_rows: Ints | None  # [D]; None = draw i is from row i
    draws: Draws

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Returns tokens, seqs, rows of logits, longest seq."""
        return len(self.token_ids), len(self.query_lens), len(self.sample_rows), int(self.seq_lens.max())

    def joined(self, others: Part) -> Part:
        """Returns both, `others` behind."""
        width, num_tokens = max(self.tables.shape[1], others.tables.shape[1]), len(self.token_ids)
        draw_rows = None
        if others.draw_rows is not None:
            draw_rows = np.append(np.arange(len(self.sample_rows)), others.draw_rows + len(self.sample_rows))
        return Part(
            np.append(self.token_ids, others.token_ids),
            np.append(self.positions, others.positions),
            np.append(self.slots, others.slots),
            self.query_lens + others.query_lens,
            np.append(self.starts[:-1], others.starts + np.int32(num_tokens)),
            np.append(self.seq_lens, others.seq_lens),
            np.concatenate([_widened(each.tables, width) for each in (self, others)]),
            np.append(self.sample_rows, others.sample_rows + num_tokens),
            draw_rows,
            self.draws.joined(others.draws),
        )


class StepLayout(NamedTuple):
    """A step on the host."""

    part: Part
    fed: Ints
    """`[F]`: the tokens, as indices into T, that the step before draws."""
    fed_by: Ints
    """`[F]`: by which of its draws."""
    fed_histories: dict[int, int]
    """See `engine.batch.Feeds`."""
    num_rows: int
    num_draws: tuple[int, ...]
    """Number of draws of each chunk."""
    scores: ScoreLayout | None
    shape: GraphShape | None
    """Shape of the graph that serves the step."""

    @property
    def inputs(self) -> tuple[Array, ...]:
        """Returns the arrays of `GraphShape.empty_inputs`, at the sizes of the step."""
        part = self.part
        arrays = (part.token_ids, part.positions, part.slots, part.sample_rows, part.starts)
        return (*arrays, part.seq_lens.astype(np.int32))


def lay_out(
    chunks: Sequence[ScheduledSeq], block_size: int, rows: DecodeRows | None = None, shape_of: ShapeOf | None = None
) -> StepLayout:
    """Lays B > 0 seqs end to end, `rows` first. Raises InternalError if a seq's blocks do not hold its tokens."""
    if rows is None:
        part = _part_of_chunks(chunks, block_size)
    elif chunks:
        part = _part_of_rows(rows, block_size).joined(_part_of_chunks(chunks, block_size))
    else:
        part = _part_of_rows(rows, block_size)
    num_rows = 0 if rows is None else len(rows)
    scores = ScoreLayout.of(chunks, part.starts[num_rows:], part.sample_rows)
    fed = fed_by = _NO_INTS
    if rows is not None and rows.feeds is not None:
        fed = np.flatnonzero(rows.feeds >= 0)  # [F]
        fed_by = rows.feeds[fed]  # [F]
    return StepLayout(
        part=part,
        fed=fed,
        fed_by=fed_by,
        fed_histories={} if rows is None else _fed_histories(rows),
        num_rows=num_rows,
        num_draws=tuple([len(chunk.samples) for chunk in chunks]),
        scores=scores,
        shape=None if shape_of is None or scores is not None else shape_of(*part.sizes),
    )


def _part_of_rows(rows: DecodeRows, block_size: int) -> Part:
    positions, numbers = rows.context_lens, np.arange(len(rows))
    tables = rows.tables[:, : int(positions.max()) // block_size + 1]  # [B, W]
    at, offsets = np.divmod(positions, block_size)
    blocks = tables[numbers, at]  # [B]
    if blocks.min() < 0:
        raise InternalError(f"no block for a token in a step of {len(rows)} rows")
    slots = blocks * np.int64(block_size) + offsets
    starts = np.arange(len(rows) + 1, dtype=np.int32)
    ones = (1,) * len(rows)
    return Part(rows.token_ids, positions, slots, ones, starts, positions + 1, tables, numbers, None, rows.draws)


def _part_of_chunks(chunks: Sequence[ScheduledSeq], block_size: int) -> Part:
    token_ids = np.array([token_id for chunk in chunks for token_id in chunk.token_ids], dtype=np.int64)  # [T]
    query_lens = np.array([len(chunk.token_ids) for chunk in chunks], dtype=np.int64)  # [B]
    context_lens = np.array([chunk.context_len for chunk in chunks], dtype=np.int64)  # [B]
    starts = np.zeros(len(chunks) + 1, dtype=np.int32)  # [B + 1]
    np.cumsum(query_lens, out=starts[1:])
    tables = _tables_of(chunks, context_lens + query_lens, block_size)
    # Token t of chunk b has position context_lens[b] + (t - starts[b]).
    seq_of = np.repeat(np.arange(len(chunks)), query_lens)  # [T]
    positions = np.arange(len(token_ids)) + (context_lens - starts[:-1])[seq_of]  # [T]
    slots = tables[seq_of, positions // block_size] * np.int64(block_size) + positions % block_size  # [T]
    sample_rows, draw_rows = _rows_of_draws(chunks, starts)
    draws = Draws.of([spec for chunk in chunks for spec in chunk.samples])
    lens, seq_lens = tuple(query_lens.tolist()), context_lens + query_lens
    return Part(token_ids, positions, slots, lens, starts, seq_lens, tables, sample_rows, draw_rows, draws)


def _rows_of_draws(chunks: Sequence[ScheduledSeq], starts: npt.NDArray[np.int32]) -> tuple[Ints, Ints | None]:
    """Returns the last tokens `[R]` of chunks that draw, and each draw's index into these; None if they are 0, 1, …"""
    counts = np.array([len(chunk.samples) for chunk in chunks], dtype=np.int64)  # [B]
    rows = starts[1:][counts > 0].astype(np.int64) - 1
    return rows, None if counts.max() < 2 else np.repeat(np.arange(len(rows)), counts[counts > 0])


def _fed_histories(rows: DecodeRows) -> dict[int, int]:
    feeds = rows.feeds
    if feeds is None:
        return {}
    return {row: int(feeds[row]) for row, spec in rows.draws.extras if feeds[row] >= 0 and reads_output(spec.params)}


def _tables_of(chunks: Sequence[ScheduledSeq], seq_lens: Ints, block_size: int) -> npt.NDArray[np.int32]:
    """Returns `[B, W]`: only blocks that this step reads or writes, since a table may run ahead of its tokens."""
    num_blocks = (-(-seq_lens // block_size)).tolist()
    tables = np.full((len(chunks), max(num_blocks)), -1, dtype=np.int32)
    for row, chunk, count in zip(tables, chunks, num_blocks, strict=True):
        if len(chunk.block_table) < count:
            raise InternalError(f"{len(chunk.block_table)} blocks for {count * block_size} token slots")
        row[:count] = np.asarray(chunk.block_table, dtype=np.int32)[:count]
    return tables


def _widened(tables: npt.NDArray[np.int32], width: int) -> npt.NDArray[np.int32]:
    return np.pad(tables, ((0, 0), (0, width - tables.shape[1])), constant_values=-1)
