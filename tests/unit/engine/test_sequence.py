"""A seq's walk from prompt to end, and when it ends."""

from __future__ import annotations

import numpy as np
import pytest

from engine.history import TokenHistory
from engine.sequence import new_block_table
from tandem.errors import InternalError
from tandem.types import BlockId, FinishReason, TokenId


def test_a_prompt_is_computed_in_chunks_and_only_its_last_chunk_draws(make_seq) -> None:
    seq = make_seq((5, 6, 7, 8, 9))
    seq.add_blocks((BlockId(3), BlockId(1)))
    first = seq.schedule(3)
    assert (first.token_ids, first.context_len, first.samples) == ((5, 6, 7), 0, ())
    last = seq.schedule(2)
    assert (last.token_ids, last.context_len) == ((8, 9), 3)
    assert list(last.block_table) == [3, 1]
    assert [sample.output_index for sample in last.samples] == [0]
    assert (seq.num_computed_tokens, seq.num_pending_tokens, seq.num_tokens) == (5, 1, 6)


def test_after_a_token_one_token_remains_and_the_counter_has_moved(make_seq) -> None:
    seq = make_seq((5, 6))
    seq.schedule(2)
    assert seq.append_token(TokenId(44)) is None
    assert (seq.num_remaining_tokens, seq.num_output_tokens, seq.num_pending_tokens, seq.num_tokens) == (1, 1, 0, 3)
    step = seq.schedule(1)
    assert (step.token_ids, step.context_len) == ((44,), 2)
    assert [sample.output_index for sample in step.samples] == [1]


def test_a_pending_token_is_no_chunk_and_counts_in_the_next_draw(make_seq) -> None:
    seq = make_seq((5, 6), (4,), presence_penalty=1.0)
    seq.schedule(3)
    with pytest.raises(InternalError):
        seq.schedule(1)  # not known
    sample = seq.draw_spec(2)
    assert seq.schedule_newest() == 4
    assert sample.history is not None
    assert sample.history.output_ids.tolist() == [4]  # the fed one is added where it is drawn
    assert (seq.num_computed_tokens, seq.num_pending_tokens) == (4, 2)
    seq.append_token(TokenId(44))
    seq.append_token(TokenId(45))
    assert (seq.output_token_ids, seq.num_pending_tokens, seq.num_remaining_tokens) == ((4, 44, 45), 0, 1)


@pytest.mark.parametrize(
    "options", [{}, {"presence_penalty": 1.0}, {"max_tokens": 3}, {"end_token_ids": frozenset({7})}]
)
def test_a_decodes_token_in_one_call_is_as_in_two(make_seq, options) -> None:
    one, two = make_seq((5, 6), **options), make_seq((5, 6), **options)
    for seq in (one, two):
        seq.schedule(2)
        seq.advance(0)
        seq.append_token(TokenId(4))
    for token_id in (TokenId(6), TokenId(7)):
        scheduled = two.schedule(1)
        one.schedule(1)
        two.step_ended(scheduled)
        assert one.append_decoded(token_id) is two.append_token(token_id)
        assert (one.num_tokens, one.num_pending_tokens, one.num_ended_tokens, one.output_token_ids) == (
            *(two.num_tokens, two.num_pending_tokens, two.num_ended_tokens),
            two.output_token_ids,
        )
    assert one.is_finished is (options.keys() >= {"max_tokens"} or options.keys() >= {"end_token_ids"})


def test_what_was_computed_for_nothing_is_rolled_back(make_seq) -> None:
    seq = make_seq((5, 6), (4,), max_tokens=3)
    seq.schedule(3)
    assert not seq.is_exhausted
    seq.schedule_newest()
    assert seq.is_exhausted
    seq.append_token(TokenId(44))
    seq.roll_back(1, 1)
    assert (seq.num_computed_tokens, seq.num_pending_tokens, seq.num_remaining_tokens) == (3, 0, 1)
    assert seq.schedule(1).token_ids == (44,)
    for wrong in ((5, 0), (0, 2)):
        with pytest.raises(InternalError):
            seq.roll_back(*wrong)


def test_a_resumed_seq_continues_the_count_of_its_completion(make_seq) -> None:
    seq = make_seq((1, 2, 3), (50, 51), max_tokens=3)
    step = seq.schedule(5)
    assert step.token_ids == (1, 2, 3, 50, 51)
    assert [sample.output_index for sample in step.samples] == [2]
    assert seq.append_token(TokenId(9)) is FinishReason.LENGTH


def test_it_ends_with_an_end_token_or_at_its_length(make_seq) -> None:
    def reasons(*tokens: int) -> list[FinishReason | None]:
        seq = make_seq((1,), max_tokens=3, end_token_ids=frozenset({TokenId(7)}))
        return [seq.append_token(TokenId(token)) for token in tokens]

    assert reasons(7) == [FinishReason.STOP]
    assert reasons(8, 8, 8) == [None, None, FinishReason.LENGTH]
    assert reasons(8, 8, 7) == [None, None, FinishReason.STOP]


def test_nothing_follows_the_end(make_seq) -> None:
    seq = make_seq((1,), max_tokens=1)
    seq.schedule(1)
    seq.append_token(TokenId(3))
    assert seq.is_finished
    with pytest.raises(InternalError):
        seq.append_token(TokenId(3))
    with pytest.raises(InternalError):
        seq.schedule(1)


@pytest.mark.parametrize(
    ("computed", "held", "wanted", "blocks"), [(0, 0, 5, 2), (4, 1, 1, 1), (5, 2, 3, 0), (5, 2, 4, 1)]
)
def test_blocks_wanted_are_those_missing_for_the_next_tokens(make_seq, computed, held, wanted, blocks) -> None:
    seq = make_seq(tuple(range(12)))
    seq.add_blocks(tuple(BlockId(n) for n in range(held)))
    seq.advance(computed)
    assert seq.blocks_wanted(wanted, block_size=4) == blocks


def test_steps_beyond_its_tokens_or_of_none_and_a_seq_without_a_prompt_are_refused(make_seq) -> None:
    seq = make_seq((1, 2, 3))
    for num_tokens in (0, -1, 4):
        with pytest.raises(InternalError):
            seq.schedule(num_tokens)
    with pytest.raises(InternalError):
        seq.advance(4)
    with pytest.raises(InternalError):
        make_seq(())


def test_history_is_handed_over_only_to_penalties_that_read_it(make_seq) -> None:
    def history(**sampling) -> TokenHistory | None:
        (sample,) = make_seq((2, 1, 2), (9,), **sampling).schedule(4).samples
        return sample.history

    assert history() is None
    for sampling, prompt_ids in (
        ({"repetition_penalty": 1.1}, [1, 2]),
        ({"presence_penalty": 0.1}, []),
        ({"frequency_penalty": -0.1}, []),
    ):
        found = history(**sampling)
        assert found is not None
        assert (found.prompt_ids.tolist(), found.output_ids.tolist()) == (prompt_ids, [9])


def test_history_counts_tokens_as_they_come_and_what_it_gave_stays_as_it_was(make_seq) -> None:
    seq = make_seq((1,), (9, 4, 9), frequency_penalty=1.0, max_tokens=9)
    (sample,) = seq.schedule(4).samples
    history = sample.history
    assert history is not None
    ids, counts = history.output_ids, history.output_counts
    for token_id in (4, 7):
        seq.append_token(TokenId(token_id))
    assert (ids.tolist(), counts.tolist()) == ([9, 4], [2, 1])
    assert (history.output_ids.tolist(), history.output_counts.tolist()) == ([9, 4, 7], [2, 2, 1])


def test_numpy_copies_nothing_of_a_block_table() -> None:
    table = new_block_table((BlockId(4), BlockId(2)))
    seen = np.asarray(table, dtype=np.int32)
    table[0] = BlockId(5)
    assert seen.tolist() == list(table)
