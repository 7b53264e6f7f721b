"""A seq's walk from prompt to end, and when it ends."""

from __future__ import annotations

import numpy as np
import pytest

from engine.block_table import BlockTable
from engine.sequence import Sequence, finish_reason_after
from tandem.errors import InternalError
from tandem.types import BlockId, FinishReason, SamplingParams, TokenId


def test_a_prompt_is_computed_in_chunks_and_only_its_last_chunk_samples(make_spec) -> None:
    seq = Sequence(make_spec((5, 6, 7, 8, 9)))
    seq.add_blocks((BlockId(3), BlockId(1)))
    first = seq.scheduled(3)
    assert (first.token_ids, first.context_len, first.sample) == ((5, 6, 7), 0, None)
    seq.advance(3)
    last = seq.scheduled(2)
    assert (last.token_ids, last.context_len) == ((8, 9), 3)
    assert list(last.block_table) == [3, 1]
    assert last.sample is not None
    assert last.sample.output_index == 0


def test_after_a_token_one_token_remains_and_the_counter_has_moved(make_spec) -> None:
    seq = Sequence(make_spec((5, 6)))
    seq.advance(2)
    assert seq.append_token(TokenId(44)) is None
    assert (seq.num_remaining_tokens, seq.num_output_tokens, seq.num_tokens) == (1, 1, 3)
    step = seq.scheduled(1)
    assert (step.token_ids, step.context_len) == ((44,), 2)
    assert step.sample is not None
    assert step.sample.output_index == 1


def test_a_resumed_seq_continues_the_count_of_its_completion(make_spec) -> None:
    seq = Sequence(make_spec((1, 2, 3, 50, 51), num_prompt_tokens=3, max_tokens=3))
    step = seq.scheduled(5)
    assert step.sample is not None
    assert step.sample.output_index == 2
    seq.advance(5)
    assert seq.append_token(TokenId(9)) is FinishReason.LENGTH


def test_it_ends_with_an_end_token_or_at_its_length() -> None:
    sampling = SamplingParams(max_tokens=3, end_token_ids=frozenset({TokenId(7)}))
    assert finish_reason_after(sampling, TokenId(7), 1) is FinishReason.STOP
    assert finish_reason_after(sampling, TokenId(8), 2) is None
    assert finish_reason_after(sampling, TokenId(8), 3) is FinishReason.LENGTH
    assert finish_reason_after(sampling, TokenId(7), 3) is FinishReason.STOP


def test_nothing_follows_the_end(make_spec) -> None:
    seq = Sequence(make_spec((1,), max_tokens=1))
    seq.advance(1)
    seq.append_token(TokenId(3))
    assert seq.is_finished
    with pytest.raises(InternalError):
        seq.append_token(TokenId(3))
    with pytest.raises(InternalError):
        seq.scheduled(1)


@pytest.mark.parametrize(
    ("computed", "held", "wanted", "blocks"), [(0, 0, 5, 2), (4, 1, 1, 1), (5, 2, 3, 0), (5, 2, 4, 1)]
)
def test_blocks_wanted_are_those_missing_for_the_next_tokens(make_spec, computed, held, wanted, blocks) -> None:
    seq = Sequence(make_spec(tuple(range(12))))
    seq.add_blocks(tuple(BlockId(n) for n in range(held)))
    seq.advance(computed)
    assert seq.blocks_wanted(wanted, block_size=4) == blocks


def test_a_preempted_seq_gives_its_blocks_back_and_starts_again_from_its_tokens(make_spec) -> None:
    seq = Sequence(make_spec((1, 2)))
    seq.add_blocks((BlockId(8),))
    seq.advance(2)
    seq.append_token(TokenId(3))
    in_step = seq.scheduled(1)
    assert list(seq.take_blocks()) == [8]
    assert list(in_step.block_table) == [8]
    assert (len(seq.block_table), seq.num_computed_tokens, seq.num_remaining_tokens) == (0, 0, 3)
    again = seq.scheduled(3)
    assert again.token_ids == (1, 2, 3)
    assert again.sample is not None
    assert again.sample.output_index == 1


@pytest.mark.parametrize("num_tokens", [0, -1, 4])
def test_a_step_beyond_its_tokens_or_of_none_is_refused(make_spec, num_tokens: int) -> None:
    with pytest.raises(InternalError):
        Sequence(make_spec((1, 2, 3))).scheduled(num_tokens)


def test_computing_beyond_its_tokens_is_refused(make_spec) -> None:
    with pytest.raises(InternalError):
        Sequence(make_spec((1, 2, 3))).advance(4)


@pytest.mark.parametrize("num_prompt_tokens", [-1, 4])
def test_a_prompt_must_be_part_of_the_tokens(make_spec, num_prompt_tokens: int) -> None:
    with pytest.raises(InternalError):
        Sequence(make_spec((1, 2, 3), num_prompt_tokens=num_prompt_tokens))


def test_history_is_handed_over_only_to_penalties_that_read_it(make_spec) -> None:
    def history(**sampling) -> tuple[tuple[int, ...], tuple[int, ...]]:
        sample = Sequence(make_spec((1, 2, 9), num_prompt_tokens=2, **sampling)).scheduled(3).sample
        assert sample is not None
        return tuple(sample.prompt_token_ids), tuple(sample.output_token_ids)

    assert history() == ((), ())
    assert history(repetition_penalty=1.1) == ((1, 2), (9,))
    assert history(presence_penalty=0.1) == ((), (9,))
    assert history(frequency_penalty=-0.1) == ((), (9,))


def test_a_block_table_reads_like_a_tuple_and_like_an_array() -> None:
    table = BlockTable((BlockId(4), BlockId(2)))
    early = np.asarray(table)
    table.extend([BlockId(n) for n in range(20)])
    assert tuple(table) == (4, 2, *range(20))
    assert (table[0], table[-1], table[1:3], len(table)) == (4, 19, (2, 0), 22)
    assert type(table[0]) is int
    assert 19 in table
    assert early.tolist() == [4, 2]
    assert np.asarray(table, dtype=np.int32).tolist() == list(table)
    with pytest.raises(IndexError):
        table[22]
