"""Log-probabilities of prompts that a decode worker computes are transformers', told once, however steps are cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.types import GroupSpec, TokenLogprobs

LENGTHS = (1, 2, 16, 17, 33, 64, 65)
NUM_TOP = 4


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> Callable[[GroupSpec], list[TokenLogprobs]]:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32, local_files_only=True)

    @torch.no_grad()
    def scores(spec: GroupSpec) -> list[TokenLogprobs]:
        prompt = spec.prompt_token_ids
        rows = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        best = [zip(*pair, strict=True) for pair in zip(*map(torch.Tensor.tolist, rows.topk(NUM_TOP)), strict=True)]
        return [
            TokenLogprobs(
                token_id,
                pytest.approx(float(rows[at, token_id]), abs=1e-5),
                tuple((each, pytest.approx(value, abs=1e-5)) for value, each in best[at]),
            )
            for at, token_id in enumerate(prompt[1:])
        ]

    return scores


def asking(spec: GroupSpec) -> GroupSpec:
    return replace(spec, sampling=replace(spec.sampling, prompt_logprobs=NUM_TOP))


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("chunk_tokens", [16, 512])
async def test_each_prompt_of_a_ragged_batch_is_scored(
    open_bench: Any, make_spec: Any, reference: Any, expected: Any, block_size: int, chunk_tokens: int
) -> None:
    specs = [asking(make_spec(length, 6, n=n)) for length, n in zip(LENGTHS, (1, 2, 1, 3, 1, 2, 1), strict=True)]
    num_blocks = 600 // block_size + 32
    async with open_bench(block_size, num_blocks, chunk_tokens=chunk_tokens) as bench:
        answers = await bench.complete(specs)
        assert answers == [[reference(spec)] * len(spec.choices) for spec in specs]
        assert [bench.router.prompt_scores.get(handle, []) for handle in bench.router.cached_tokens] == [
            expected(specs[handle]) for handle in bench.router.cached_tokens
        ]


async def test_a_pool_that_is_far_too_small_repeats_none(
    open_bench: Any, make_spec: Any, reference: Any, expected: Any
) -> None:
    specs = [asking(make_spec(length, 120)) for length in (17, 18, 19, 20, 21, 22)]
    async with open_bench(4, 45, chunk_tokens=16) as bench:
        assert await bench.complete(specs) == [[reference(spec)] for spec in specs]
        assert bench.worker.load().preemptions > 0
        assert [bench.router.prompt_scores[handle] for handle in range(len(specs))] == [*map(expected, specs)]


async def test_a_prompt_whose_kv_is_known_here_is_scored_whole(
    open_bench: Any, make_spec: Any, reference: Any, expected: Any
) -> None:
    spec = make_spec(65, 6)
    async with open_bench() as bench:
        for _ in range(2):
            assert await bench.complete([spec]) == [[reference(spec)]]
        assert bench.engine.pool.counts().cached
        assert await bench.complete([asking(spec)]) == [[reference(spec)]]
        assert bench.router.prompt_scores == {2: expected(spec)}
