"""One step's tensors from its scheduled seqs, and the seam to the decoder that reads them.

Pure, and cheap, since it runs every step. Numpy does the work; torch is entered once per tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.decode_rows import DecodeRows, StepSeqs
from engine.penalties import reads_output
from engine.prompt_scores import ScorePlan
from engine.step import SampleSpec, ScheduledSeq
from engine.upload import upload
from kernels.attention import AttentionMetadata
from tandem.errors import InternalError

Ints = npt.NDArray[np.int64]


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
    sample_specs: tuple[SampleSpec, ...]
    """D of them, seq after seq."""
    draw_rows: torch.Tensor | None
    """`[D]` int64: the row of each draw, as an index into R; None if draw i is from row i."""
    num_draws: tuple[int, ...]
    """Of each seq; D in all."""
    feeds: Feeds | None
    scores: ScorePlan | None = None
    """Given if known tokens are to be scored."""
    rows: DecodeRows | None = None
    """Given if these are all that the step computes; `sample_specs` is empty then where `rows.draws` tell all."""


class Forward(Protocol):
    """`models.decoder.Decoder`, or a fake."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        sample_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Stores KV of `[T]` tokens in `kv_cache`; returns logits `[R, V]` of `sample_rows` `[R]`."""

    def hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        sample_rows: torch.Tensor,
    ) -> torch.Tensor:
        """As `forward`, but for the last projection: returns `[R, E]`."""

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[R, E]` of `hidden` → logits `[R, V]`, in memory that the caller may write."""


def build_batch(seqs: Sequence[ScheduledSeq], block_size: int, device: torch.device) -> Batch:
    """Lays B > 0 seqs end to end. Raises InternalError if a seq's blocks do not hold its tokens."""
    rows, others = (seqs.rows, seqs.others) if isinstance(seqs, StepSeqs) else (None, seqs)
    if rows is not None and not others:
        return _build_rows(rows, block_size, device)
    num_rows = 0 if rows is None else len(rows)
    token_ids = np.array([token_id for seq in others for token_id in seq.token_ids], dtype=np.int64)  # [T]
    query_lens = np.array([1] * num_rows + [len(seq.token_ids) for seq in others], dtype=np.int64)  # [B]
    context_lens = np.array([seq.context_len for seq in others], dtype=np.int64)  # [B]
    if rows is not None:
        token_ids = np.concatenate((rows.token_ids, token_ids))
        context_lens = np.concatenate((rows.context_lens, context_lens))
    seq_lens = context_lens + query_lens  # [B]
    cu_seqlens_q = np.zeros(len(seqs) + 1, dtype=np.int32)  # [B + 1]
    np.cumsum(query_lens, out=cu_seqlens_q[1:])
    block_tables = _pad_tables(rows, others, seq_lens, block_size)  # [B, max_blocks]
    # Token t of seq b has position context_lens[b] + (t - cu_seqlens_q[b]).
    seq_of = np.repeat(np.arange(len(seqs)), query_lens)  # [T]
    positions = np.arange(len(token_ids)) + (context_lens - cu_seqlens_q[:-1])[seq_of]  # [T]
    slots = block_tables[seq_of, positions // block_size] * np.int64(block_size) + positions % block_size  # [T]
    specs = (*(() if rows is None else rows.sample_specs()), *(spec for seq in others for spec in seq.samples))
    num_draws = (1,) * num_rows + tuple(len(seq.samples) for seq in others)
    sample_rows, draw_rows = _rows_of_draws(specs, num_draws, cu_seqlens_q)  # [R], [D]
    feeds = _feeds(rows, others, num_draws, cu_seqlens_q)
    fed_tokens, fed_by = (sample_rows[:0], sample_rows[:0]) if feeds is None else feeds[:2]  # [F], [F]
    longs = (token_ids, positions, sample_rows, draw_rows, fed_tokens, fed_by, slots)
    ints = (cu_seqlens_q, seq_lens.astype(np.int32), block_tables)
    tokens, at, sampled_at, drawn_at, fed_at, fed, slot_mapping, starts, lens, tables = upload((*longs, *ints), device)
    metadata = AttentionMetadata(
        cu_seqlens_q=starts,
        seq_lens=lens,
        block_tables=tables,
        slot_mapping=slot_mapping,
        query_lens_host=tuple(query_lens.tolist()),
        seq_lens_host=tuple(seq_lens.tolist()),
    )
    is_scored = any(seq.scored is not None for seq in others)
    return Batch(
        token_ids=tokens,
        positions=at,
        metadata=metadata,
        sample_rows=sampled_at,
        sample_specs=specs,
        draw_rows=drawn_at if len(draw_rows) else None,
        num_draws=num_draws,
        feeds=None if feeds is None else Feeds(fed_at, fed, feeds[2]),
        scores=ScorePlan.of(seqs, cu_seqlens_q, sample_rows, device) if is_scored else None,
    )


def _build_rows(rows: DecodeRows, block_size: int, device: torch.device) -> Batch:
    """A step of nothing but decodes: one token and one draw for each seq."""
    num_seqs, positions = len(rows), rows.context_lens
    numbers = np.arange(num_seqs + 1)
    seq_lens = positions + 1
    block_tables = rows.tables[:, : int(positions.max()) // block_size + 1]  # [B, max_blocks]
    at, offsets = np.divmod(positions, block_size)
    blocks = block_tables[numbers[:-1], at]  # [B]
    if blocks.min() < 0:
        raise InternalError(f"no block for a token in a step of {num_seqs} seqs")
    slots = blocks * np.int64(block_size) + offsets
    fed_rows = np.flatnonzero(rows.feeds >= 0) if rows.feeds is not None else numbers[:0]  # [F]
    fed_by = rows.feeds[fed_rows] if rows.feeds is not None else numbers[:0]  # [F]
    longs = (rows.token_ids, positions, numbers[:-1], fed_rows, fed_by, slots)
    ints = (numbers.astype(np.int32), seq_lens.astype(np.int32), np.ascontiguousarray(block_tables))
    tokens, token_at, sampled_at, fed_at, fed, slot_mapping, starts, lens, tables = upload((*longs, *ints), device)
    metadata = AttentionMetadata(
        cu_seqlens_q=starts,
        seq_lens=lens,
        block_tables=tables,
        slot_mapping=slot_mapping,
        query_lens_host=(1,) * num_seqs,
        seq_lens_host=tuple(seq_lens.tolist()),
    )
    return Batch(
        token_ids=tokens,
        positions=token_at,
        metadata=metadata,
        sample_rows=sampled_at,
        sample_specs=rows.sample_specs() if rows.draws is None else (),
        draw_rows=None,
        num_draws=(1,) * num_seqs,
        feeds=Feeds(fed_at, fed, _fed_histories(rows)) if len(fed_rows) else None,
        rows=rows,
    )


def _rows_of_draws(
    specs: Sequence[SampleSpec], num_draws: tuple[int, ...], cu_seqlens_q: npt.NDArray[np.int32]
) -> tuple[Ints, Ints]:
    """Returns the tokens `[R]` to draw from, each once, and each draw's index into them; none if they are 0, 1, …"""
    from_end = np.array([spec.from_end for spec in specs], dtype=np.int64)  # [D]
    seq_of = np.repeat(np.arange(len(num_draws)), num_draws)  # [D]
    rows = cu_seqlens_q[1:][seq_of] - 1 - from_end  # [D]
    if (from_end < 0).any() or (rows < cu_seqlens_q[:-1][seq_of]).any():
        raise InternalError(f"a draw {from_end.max()} tokens before the end of a share that is shorter")
    if (np.diff(rows) > 0).all():
        return rows, rows[:0]
    unique, inverse = np.unique(rows, return_inverse=True)
    return unique, inverse.astype(np.int64)


def _feeds(
    rows: DecodeRows | None,
    others: Sequence[ScheduledSeq],
    num_draws: tuple[int, ...],
    cu_seqlens_q: npt.NDArray[np.int32],
) -> tuple[Ints, Ints, dict[int, int]] | None:
    """Returns where fed tokens go and by which draws they come, `[F]` each, and `Feeds.history`; None if F = 0."""
    num_rows = 0 if rows is None else len(rows)
    fed = [(index, seq.feed) for index, seq in enumerate(others, num_rows) if seq.feed is not None]
    if rows is not None and rows.feeds is not None:
        fed = [(index, feed) for index, feed in enumerate(rows.feeds.tolist()) if feed >= 0] + fed
    if not fed:
        return None
    feeds = np.array([feed for _, feed in fed], dtype=np.int64)
    tokens = cu_seqlens_q[1:][[index for index, _ in fed]].astype(np.int64) - 1
    first_draw = np.cumsum((0, *num_draws)).tolist()
    history = {} if rows is None else _fed_histories(rows)
    history |= {
        first_draw[index] + number: feed
        for index, feed in fed
        if index >= num_rows
        for number, spec in enumerate(others[index - num_rows].samples)
        if spec.from_end == 0 and reads_output(spec.params)
    }
    return tokens, feeds, history


def _fed_histories(rows: DecodeRows) -> dict[int, int]:
    """Of the rows' part of `Feeds.history`; row i's draw is number i."""
    if rows.feeds is None or rows.draws is not None:
        return {}
    return {
        index: feed
        for index, (spec, feed) in enumerate(zip(rows.specs, rows.feeds.tolist(), strict=True))
        if feed >= 0 and reads_output(spec.params)
    }


def _pad_tables(
    rows: DecodeRows | None, others: Sequence[ScheduledSeq], seq_lens: Ints, block_size: int
) -> npt.NDArray[np.int32]:
    """Returns `[B, max_blocks]` int32, each seq's blocks and -1 behind them.

    Only blocks that this step reads or writes: a table may run ahead of its tokens.
    """
    num_blocks = (-(-seq_lens // block_size)).tolist()
    tables = np.full((len(seq_lens), max(num_blocks)), -1, dtype=np.int32)
    num_rows = 0
    if rows is not None:
        num_rows, width = len(rows), min(rows.tables.shape[1], tables.shape[1])
        tables[:num_rows, :width] = rows.tables[:, :width]
    for row, seq, count in zip(tables[num_rows:], others, num_blocks[num_rows:], strict=True):
        if len(seq.block_table) < count:
            raise InternalError(f"{len(seq.block_table)} blocks for {count * block_size} token slots")
        row[:count] = np.asarray(seq.block_table, dtype=np.int32)[:count]
    return tables
