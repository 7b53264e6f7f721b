"""One step's tensors from its rows and chunks, and the seam to the decoder that reads them.

    seqs     │ row 0 │ row 1 │ … │ chunk 0 │ chunk 1 │ …        B of them
    tokens   │   1   │   1   │   │  k ≥ 1  │         │          T
    draws    │   1   │   1   │   │  d ≥ 0  │         │          D, from R rows of logits

Pure, and cheap, since it runs every step. Numpy does the work; torch is entered once per tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from engine.draws import Draws
from engine.graph_shapes import GraphShape
from engine.history import Ints
from engine.penalties import reads_output
from engine.prompt_scores import ScorePlan
from engine.step import DecodeRows, ScheduledSeq
from engine.upload import Array, packed_bytes, unpack, upload, upload_packed
from kernels.attention import AttentionMetadata
from kernels.compiled_step import StepInputs
from tandem.errors import InternalError

_NO_INTS: Ints = np.zeros(0, np.int64)


ShapeOf: TypeAlias = Callable[[int, int, int, int], GraphShape | None]
"""By tokens, seqs, rows of logits and longest seq of a step: the graph that serves the step."""


@dataclass(frozen=True, slots=True)
class GraphInputs:
    """A step's inputs as a graph reads them, but for the block tables."""

    shape: GraphShape
    packed: torch.Tensor
    """`[bytes]` uint8: `GraphShape.empty_inputs`, filled. The batch's own tensors are the used parts of it."""


@dataclass(frozen=True, slots=True)
class Feeds:
    """Tokens of a batch that the step before draws: F of them."""

    tokens: torch.Tensor
    """`[F]` int64: indices into T."""
    draws: torch.Tensor
    """`[F]` int64: numbers of draws of the step before."""
    history: dict[int, int]
    """For each of this step's draws whose penalties must see a fed token: by which draw of the step before it comes."""

    def put(self, drawn_ids: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Copies what the step before drew, `[D']` int64 with -1 for broken rows, into `token_ids` `[T]`."""
        fed = drawn_ids.index_select(0, self.draws).clamp_(min=0)  # a broken seq's next token is not kept
        token_ids.index_copy_(0, self.tokens, fed)


@dataclass(frozen=True, slots=True)
class Batch:
    """What the decoder and the sampler read in one step; B seqs, T tokens, R rows of logits, D ≥ R draws."""

    token_ids: torch.Tensor
    """`[T]` int64, seq after seq; 0 in the place of tokens still to be fed."""
    positions: torch.Tensor
    """`[T]` int64: absolute position of each token in its seq."""
    metadata: AttentionMetadata
    sample_rows: torch.Tensor
    """`[R]` int64, ascending: the tokens, as indices into T, whose logits are wanted; each once."""
    draws: Draws
    """D of them."""
    draw_rows: torch.Tensor | None
    """`[D]` int64: the row of each draw, as an index into R; None if draw i is from row i."""
    num_rows: int
    """Number of decodes: the first seqs, each with a single draw."""
    num_draws: tuple[int, ...]
    """Number of draws of each chunk."""
    feeds: Feeds | None
    scores: ScorePlan | None = None
    """Given if known tokens are to be scored."""
    graph: GraphInputs | None = None
    """Given if a graph serves the step."""


class Forward(Protocol):
    """`models.decoder.Decoder`, or a fake."""

    def forward(self, step: StepInputs) -> torch.Tensor:
        """Stores KV of the step's tokens; returns logits `[R, V]` of its rows."""

    def hidden(self, step: StepInputs) -> torch.Tensor:
        """Runs `forward` without the last projection: returns `[R, E]`."""

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[R, E]` of `hidden` → logits `[R, V]`, in memory that the caller may write."""


class _Part(NamedTuple):
    """The rows or the chunks of a step, laid end to end: B seqs, T tokens, R rows of logits."""

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

    def joined(self, others: _Part) -> _Part:
        """Returns both, `others` behind."""
        width, num_tokens = max(self.tables.shape[1], others.tables.shape[1]), len(self.token_ids)
        draw_rows = None
        if others.draw_rows is not None:
            draw_rows = np.append(np.arange(len(self.sample_rows)), others.draw_rows + len(self.sample_rows))
        return _Part(
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


def build_batch(
    chunks: Sequence[ScheduledSeq],
    block_size: int,
    device: torch.device,
    rows: DecodeRows | None = None,
    shape_of: ShapeOf | None = None,
) -> Batch:
    """Lays B > 0 seqs end to end, `rows` first. Raises InternalError if a seq's blocks do not hold its tokens."""
    if rows is None:
        part = _part_of_chunks(chunks, block_size)
    elif chunks:
        part = _part_of_rows(rows, block_size).joined(_part_of_chunks(chunks, block_size))
    else:
        part = _part_of_rows(rows, block_size)
    is_scored = any(chunk.scored is not None for chunk in chunks)
    shape = None if shape_of is None or is_scored else shape_of(*part.sizes)
    (tokens, at, slot_mapping, sampled_at, starts, lens), (drawn_at, fed_at, feeds, tables), graph = _placed(
        part, rows, shape, device
    )
    metadata = AttentionMetadata(
        cu_seqlens_q=starts,
        seq_lens=lens,
        block_tables=tables,
        slot_mapping=slot_mapping,
        query_lens_host=part.query_lens,
        seq_lens_host=tuple(part.seq_lens.tolist()),
    )
    num_rows = 0 if rows is None else len(rows)
    return Batch(
        token_ids=tokens,
        positions=at,
        metadata=metadata,
        sample_rows=sampled_at,
        draws=part.draws,
        draw_rows=None if part.draw_rows is None else drawn_at,
        num_rows=num_rows,
        num_draws=tuple([len(chunk.samples) for chunk in chunks]),
        feeds=Feeds(fed_at, feeds, _fed_histories(rows)) if rows is not None and len(fed_at) else None,
        scores=ScorePlan.of(chunks, part.starts[num_rows:], part.sample_rows, device) if is_scored else None,
        graph=graph,
    )


def _placed(
    part: _Part, rows: DecodeRows | None, shape: GraphShape | None, device: torch.device
) -> tuple[list[torch.Tensor], list[torch.Tensor], GraphInputs | None]:
    """Returns a step's inputs on `device`: those of `GraphShape.empty_inputs`, the others, and both as a graph's."""
    fed = fed_by = _NO_INTS
    if rows is not None and rows.feeds is not None:
        fed = np.flatnonzero(rows.feeds >= 0)  # [F]
        fed_by = rows.feeds[fed]  # [F]
    inputs: tuple[Array, ...] = (part.token_ids, part.positions, part.slots, part.sample_rows, part.starts)
    inputs = (*inputs, part.seq_lens.astype(np.int32))
    draw_rows = _NO_INTS if part.draw_rows is None else part.draw_rows
    others = (draw_rows, fed, fed_by, np.ascontiguousarray(part.tables))
    if shape is None:
        tensors = upload((*inputs, *others), device)
        return tensors[: len(inputs)], tensors[len(inputs) :], None
    padded = shape.padded(inputs)
    packed = upload_packed((*padded, *others), device)
    tensors = unpack(packed, (*padded, *others))
    used = [tensor[: len(array)] for tensor, array in zip(tensors, inputs, strict=False)]
    return used, tensors[len(inputs) :], GraphInputs(shape, packed[: packed_bytes(padded)])


def _part_of_rows(rows: DecodeRows, block_size: int) -> _Part:
    positions, numbers = rows.context_lens, np.arange(len(rows))
    tables = rows.tables[:, : int(positions.max()) // block_size + 1]  # [B, W]
    at, offsets = np.divmod(positions, block_size)
    blocks = tables[numbers, at]  # [B]
    if blocks.min() < 0:
        raise InternalError(f"no block for a token in a step of {len(rows)} rows")
    slots = blocks * np.int64(block_size) + offsets
    starts = np.arange(len(rows) + 1, dtype=np.int32)
    ones = (1,) * len(rows)
    return _Part(rows.token_ids, positions, slots, ones, starts, positions + 1, tables, numbers, None, rows.draws)


def _part_of_chunks(chunks: Sequence[ScheduledSeq], block_size: int) -> _Part:
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
    return _Part(token_ids, positions, slots, lens, starts, seq_lens, tables, sample_rows, draw_rows, draws)


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
