"""The budget's properties, and that every prompt gets its turn."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.chunking import plan_chunks

remaining_lists = st.lists(st.integers(1, 3000), max_size=30)


@given(remaining_lists, st.integers(0, 1024), st.integers(0, 40))
def test_a_plan_keeps_to_its_budget_and_to_each_seq(remaining: list[int], budget: int, max_seqs: int) -> None:
    chunks = plan_chunks(remaining, budget, max_seqs)
    assert len(chunks) == len(remaining)
    assert sum(chunks) <= budget
    assert sum(chunk > 0 for chunk in chunks) <= max_seqs
    assert all(0 <= chunk <= left for chunk, left in zip(chunks, remaining, strict=True))


@given(remaining_lists, st.integers(0, 1024), st.integers(0, 40))
def test_first_come_is_first_served_and_nothing_is_left_unused(remaining, budget, max_seqs) -> None:
    chunks = plan_chunks(remaining, budget, max_seqs)
    served = [index for index, chunk in enumerate(chunks) if chunk]
    assert served == list(range(len(served)))
    assert all(chunks[index] == remaining[index] for index in served[:-1])
    if sum(chunks) < budget and len(served) < max_seqs:
        assert chunks == remaining


@given(remaining_lists, st.integers(1, 1024), st.integers(1, 40))
def test_every_prompt_ends_in_the_steps_that_its_predecessors_leave(remaining, budget, max_seqs) -> None:
    waiting, steps = list(remaining), 0
    while waiting:
        chunks = plan_chunks(waiting, budget, max_seqs)
        assert chunks[0] > 0
        waiting = [left - chunk for left, chunk in zip(waiting, chunks, strict=True) if left > chunk]
        steps += 1
    assert steps <= sum(-(-left // budget) for left in remaining)


def test_what_the_first_leaves_over_goes_to_the_next() -> None:
    assert plan_chunks([3, 900, 5], 512, 8) == [3, 509, 0]
    assert plan_chunks([3, 4, 5], 512, 2) == [3, 4, 0]
    assert plan_chunks([900, 4], 512, 8) == [512, 0]
    assert plan_chunks([], 512, 8) == []
