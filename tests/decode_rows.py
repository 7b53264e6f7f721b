"""Decodes as rows, for tests: made of sequences, and taken apart again."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from engine.draws import SampleSpec
from engine.sequence import Sequence
from engine.step import DecodeRows, ScheduledSeq, Step
from tandem.types import BlockId, SamplingParams, TokenId


def rows_of(seqs: SequenceOf[Sequence], feeds: SequenceOf[int] | None = None) -> DecodeRows:
    """The newest token of each, known or fed (-1 = known), which has one draw; moves them on."""
    chunks = []
    for seq, feed in zip(seqs, feeds or [-1] * len(seqs), strict=True):
        spec = seq.draw_spec(seq.num_tokens - seq.num_prompt_tokens)
        token_id = seq.token_ids[-1] if feed < 0 else TokenId(0)
        chunks.append(ScheduledSeq((token_id,), seq.num_computed_tokens, seq.block_table, (spec,)))
        seq.num_computed_tokens += 1
        seq.num_pending_tokens += 1
        seq.num_tokens += 1
    return DecodeRows.of(chunks, feeds)


def chunks_of(rows: DecodeRows | None) -> tuple[ScheduledSeq, ...]:
    """A chunk of one token for each row, without its feed."""
    if rows is None:
        return ()
    columns, specs = rows.draws.columns, dict(rows.draws.extras)
    chunks = []
    for row in range(len(rows)):
        params = SamplingParams(
            max_tokens=1 << 30,
            temperature=float(columns.temperature[row]),
            top_k=int(columns.top_k[row]),
            top_p=float(columns.top_p[row]),
            min_p=float(columns.min_p[row]),
            seed=int(columns.seed[row]) & 0xFFFFFFFFFFFFFFFF,
        )
        spec = specs.get(row) or SampleSpec(params, int(rows.draws.output_indexes[row]))
        table = tuple(BlockId(block) for block in rows.tables[row].tolist() if block >= 0)
        token_id, context_len = TokenId(int(rows.token_ids[row])), int(rows.context_lens[row])
        chunks.append(ScheduledSeq((token_id,), context_len, table, (spec,)))
    return tuple(chunks)


def seqs_of(step: Step) -> tuple[ScheduledSeq, ...]:
    """Rows as chunks, then the chunks."""
    return (*chunks_of(step.rows), *step.chunks)


def feeds_of(step: Step) -> list[int]:
    """Per row, then per chunk: the draw that brings its last token, -1 = it is known."""
    feeds = [] if step.rows is None else [-1] * len(step.rows) if step.rows.feeds is None else step.rows.feeds.tolist()
    return feeds + [-1] * len(step.chunks)
