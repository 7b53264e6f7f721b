"""A step's tensors, against a plain walk over its seqs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import build_batch
from engine.draws import SampleSpec
from engine.sequence import new_block_table
from engine.step import DecodeRows, ScheduledSeq
from tandem.errors import InternalError
from tandem.types import BlockId, SamplingParams, TokenId
from tests.decode_rows import chunks_of

CPU = torch.device("cpu")
SAMPLE = SampleSpec(SamplingParams(max_tokens=1), 0)


def scheduled(tokens, context_len, blocks, samples: tuple[SampleSpec, ...] = (SAMPLE,)) -> ScheduledSeq:
    table = new_block_table([BlockId(b) for b in blocks])
    return ScheduledSeq(tuple(TokenId(t) for t in tokens), context_len, table, samples)


def test_a_chunk_and_a_decode_step_lie_end_to_end() -> None:
    seqs = [scheduled([10, 11, 12], 3, [7, 5], samples=()), scheduled([20], 4, [2, 0])]
    batch = build_batch(seqs, 4, CPU)
    assert batch.token_ids.tolist() == [10, 11, 12, 20]
    assert batch.positions.tolist() == [3, 4, 5, 4]
    assert batch.metadata.slot_mapping.tolist() == [31, 20, 21, 0]
    assert batch.metadata.cu_seqlens_q.tolist() == [0, 3, 4]
    assert batch.metadata.seq_lens.tolist() == [6, 5]
    assert batch.metadata.block_tables.tolist() == [[7, 5], [2, 0]]
    assert (batch.metadata.query_lens_host, batch.metadata.seq_lens_host) == ((3, 1), (6, 5))
    assert batch.sample_rows.tolist() == [3]
    assert batch.draws.extras == ((0, SAMPLE),)
    assert (batch.num_draws, batch.draw_rows, batch.feeds) == ((0, 1), None, None)


def test_dtypes_are_those_of_the_attention_contract() -> None:
    batch = build_batch([scheduled([1], 0, [3])], 16, CPU)
    metadata = batch.metadata
    int32 = (metadata.cu_seqlens_q, metadata.seq_lens, metadata.block_tables)
    assert {tensor.dtype for tensor in int32} == {torch.int32}
    int64 = (batch.token_ids, batch.positions, batch.sample_rows, metadata.slot_mapping)
    assert {tensor.dtype for tensor in int64} == {torch.int64}
    assert all(tensor.is_contiguous() for tensor in (*int32, *int64))


def test_blocks_beyond_this_step_are_left_out() -> None:
    batch = build_batch([scheduled([1], 0, [3, 9, 8]), scheduled([1, 2], 3, [4, 6])], 4, CPU)
    assert batch.metadata.block_tables.tolist() == [[3, -1], [4, 6]]


def test_a_step_that_samples_nothing_has_no_rows() -> None:
    batch = build_batch([scheduled([1, 2], 0, [3], samples=())], 4, CPU)
    assert batch.sample_rows.shape == (0,)
    assert batch.sample_rows.dtype == torch.int64


def test_a_table_too_short_for_its_tokens_is_refused() -> None:
    with pytest.raises(InternalError, match="1 blocks for 8 token slots"):
        build_batch([scheduled([1, 2], 3, [3])], 4, CPU)


def test_draws_that_share_a_row_of_logits_share_its_computation() -> None:
    seqs = [
        scheduled([1, 2, 3], 0, [3]),
        scheduled([4], 4, [2, 0], ()),
        scheduled([5, 6], 0, [1], (SAMPLE,) * 3),
    ]
    batch = build_batch(seqs, 4, CPU)
    assert batch.sample_rows.tolist() == [2, 5]
    assert batch.draw_rows is not None
    assert batch.draw_rows.tolist() == [0, 1, 1, 1]
    assert batch.num_draws == (1, 0, 3)


def test_rows_come_before_chunks_and_their_draws_before_those_of_chunks() -> None:
    rows = DecodeRows.of([scheduled([7], 4, [9, 8]), scheduled([6], 0, [3])])
    chunks = [scheduled([10, 11, 12], 3, [7, 5], samples=()), scheduled([20, 21], 3, [2, 0], (SAMPLE, SAMPLE))]
    mixed, alone = build_batch(chunks, 4, CPU, rows), build_batch([*chunks_of(rows), *chunks], 4, CPU)
    assert (mixed.num_rows, mixed.num_draws, alone.num_draws) == (2, (0, 2), (1, 1, 0, 2))
    for name in ("token_ids", "positions", "sample_rows", "draw_rows"):
        assert torch.equal(getattr(mixed, name), getattr(alone, name)), name
    for name in ("cu_seqlens_q", "seq_lens", "block_tables", "slot_mapping"):
        assert torch.equal(getattr(mixed.metadata, name), getattr(alone.metadata, name)), name
    assert mixed.draws.output_indexes.tolist() == alone.draws.output_indexes.tolist()
    assert mixed.draws.extras[-1][0] == 3


def test_a_row_without_a_block_for_its_token_is_refused() -> None:
    with pytest.raises(InternalError, match="no block"):
        build_batch([], 4, CPU, DecodeRows.of([scheduled([7], 4, [9]), scheduled([7], 4, [3, 4])]))


def test_what_the_step_before_drew_takes_its_place_and_a_broken_draw_is_any_token() -> None:
    penalised = (SAMPLE._replace(params=replace(SAMPLE.params, repetition_penalty=2.0)),)
    rows = DecodeRows.of(
        [scheduled([0], 3, [3]), scheduled([9], 0, [4], penalised), scheduled([0], 1, [5], penalised)], [1, -1, 0]
    )
    batch = build_batch([scheduled([7, 8], 0, [6])], 4, CPU, rows)
    assert batch.feeds is not None
    assert batch.feeds.history == {2: 0}  # only penalties look at it, and only where a token is fed
    batch.feeds.put(torch.tensor([40, -1]), batch.token_ids)
    assert batch.token_ids.tolist() == [0, 9, 40, 7, 8]


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20), st.booleans()), min_size=1, max_size=6),
    st.sampled_from([1, 3, 16]),
)
def test_each_token_has_its_position_and_its_slot(shapes: list[tuple[int, int, bool]], block_size: int) -> None:
    seqs, expected, rows, next_block = [], [], [], 0
    for query_len, context_len, sampled in shapes:
        num_blocks = -(-(query_len + context_len) // block_size)
        blocks = list(range(next_block, next_block + num_blocks))[::-1]
        next_block += num_blocks
        positions = range(context_len, context_len + query_len)
        expected += [(p + 100, p, blocks[p // block_size] * block_size + p % block_size) for p in positions]
        seqs.append(scheduled([p + 100 for p in positions], context_len, blocks, (SAMPLE,) if sampled else ()))
        rows += [len(expected) - 1] if sampled else []
    batch = build_batch(seqs, block_size, CPU)
    slots = batch.metadata.slot_mapping.tolist()
    assert list(zip(batch.token_ids.tolist(), batch.positions.tolist(), slots, strict=True)) == expected
    assert len(set(slots)) == len(slots)
    assert batch.sample_rows.tolist() == rows
