"""Log-probabilities of prompts, chunk by chunk; the fake engine's are minus the token ids."""

from __future__ import annotations

from typing import Any

import pytest

from engine.step import StepFailed


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_a_prompt_of_two_chunks_is_told_once(bench: Any, make_spec: Any, num_choices: int) -> None:
    spec = make_spec(10, num_output_tokens=[0] * num_choices, prompt_logprobs=0)
    handle = bench.prefill(1, spec)
    plain = bench.prefill(2, make_spec(3))
    await bench.router.until(lambda: {handle, plain} <= set(bench.router.handoffs))

    told = bench.router.prompt_scores
    assert [(each.token_id, each.logprob) for each in told[handle]] == [(each, -each) for each in range(2, 11)]
    assert plain not in told
    await bench.settles()


async def test_output_tokens_of_a_resumed_choice_are_not_scored(bench: Any, make_spec: Any) -> None:
    handle = bench.prefill(1, make_spec(6, num_output_tokens=[2], prompt_logprobs=0))
    await bench.router.until(lambda: handle in bench.router.handoffs)

    assert [each.token_id for each in bench.router.prompt_scores[handle]] == [2, 3, 4, 5, 6]
    await bench.settles()


async def test_a_prompt_with_broken_logits_fails_alone(bench: Any, make_spec: Any) -> None:
    bench.engine.broken_score = 5
    broken = bench.prefill(1, make_spec(10, prompt_logprobs=0))
    other = bench.prefill(2, make_spec(4, prompt_logprobs=0))
    await bench.router.until(lambda: broken in bench.router.errors and other in bench.router.handoffs)

    assert isinstance(bench.router.errors[broken], StepFailed)
    assert broken not in bench.router.firsts
    await bench.settles()


async def test_of_a_prompt_that_is_released_in_a_step_nothing_is_told(bench: Any, make_spec: Any) -> None:
    bench.engine.gate.close()
    handle = bench.prefill(1, make_spec(10, prompt_logprobs=0))
    await bench.engine.gate.reached()
    bench.worker.release(bench.router, handle)
    await bench.engine.gate.open()
    await bench.settles()

    assert not bench.router.prompt_scores
