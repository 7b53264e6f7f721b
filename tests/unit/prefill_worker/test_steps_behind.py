"""Where steps go on by themselves, a prompt's next chunk is launched behind the one that computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
async def bench(make_bench: Callable[..., Any]) -> Any:
    made = make_bench(is_asynchronous=True)
    made.engine.step_s = 0.0
    return made


async def test_chunks_follow_each_other_and_blocks_go_as_their_own_chunk_ends(bench: Any, make_spec: Any) -> None:
    bench.engine.gate.close()
    handle = bench.prefill(1, make_spec(20))
    await bench.engine.gate.reached(2)
    assert [(batch[0].context_len, len(batch[0].token_ids)) for batch in bench.engine.batches] == [(0, 8), (8, 8)]
    await bench.engine.gate.let_one_pass()
    await bench.sender.push_gate.reached(1)
    assert bench.sender.handoffs[0].pushes == [(0, tuple(bench.engine.batches[0][0].block_table[:2]))]
    assert handle not in bench.router.first_tokens
    await bench.engine.gate.open()
    await bench.router.until(lambda: handle in bench.router.handoffs)
    assert bench.router.first_tokens[handle].token_ids == (40,)
    await bench.settles()


async def test_choices_draw_once_their_prompt_s_last_chunk_has_ended(bench: Any, make_spec: Any) -> None:
    bench.engine.gate.close()
    handle = bench.prefill(1, make_spec(20, num_output_tokens=(0, 0)))
    await bench.engine.gate.reached(2)
    await bench.engine.gate.let_one_pass()
    await bench.engine.gate.reached(3)  # the last chunk, behind one whose result is still to come
    await bench.engine.gate.open()
    await bench.router.until(lambda: handle in bench.router.handoffs)
    assert bench.sender.handoffs[0].committed.keys() == {0, 1}
    await bench.settles()


async def test_a_scored_prompt_waits_until_its_scores_are_read(bench: Any, make_spec: Any) -> None:
    handle = bench.prefill(1, make_spec(20, prompt_logprobs=0))
    await bench.router.until(lambda: handle in bench.router.handoffs)
    assert [len(batch[0].token_ids) for batch in bench.engine.batches] == [8, 8, 4]


async def test_others_are_computed_behind_a_prompt_that_ends(bench: Any, make_spec: Any) -> None:
    bench.engine.gate.close()
    first, second = bench.prefill(1, make_spec(8)), bench.prefill(2, make_spec(12, cache_salt="other"))
    await bench.engine.gate.reached(2)
    assert [[chunk.context_len for chunk in batch] for batch in bench.engine.batches] == [[0], [0]]
    await bench.engine.gate.open()
    await bench.router.until(lambda: {first, second} <= set(bench.router.handoffs))
    await bench.settles()
