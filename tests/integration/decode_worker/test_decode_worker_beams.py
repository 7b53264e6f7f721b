"""Beam search on a real engine: what transformers finds, at every block size and in a pool too small for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.types import ChoiceSpec, GroupSpec, TokenId

WIDTH, MAX_TOKENS = 4, 24
ENDS = frozenset(map(TokenId, range(40)))

MakeSpec = Callable[..., GroupSpec]


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32, local_files_only=True)


def expected(model: Any, spec: GroupSpec) -> list[list[TokenId]]:
    ids = torch.tensor([spec.prompt_token_ids])
    sequences = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=WIDTH,
        num_return_sequences=WIDTH,
        do_sample=False,
        max_new_tokens=spec.sampling.max_tokens,
        eos_token_id=sorted(spec.sampling.end_token_ids) or None,
        pad_token_id=0,
    )
    outputs: list[list[TokenId]] = sequences[:, ids.shape[1] :].tolist()
    ends = [
        next((i for i, token_id in enumerate(tokens) if token_id in spec.sampling.end_token_ids), len(tokens))
        for tokens in outputs
    ]
    return [tokens[: end + 1] for tokens, end in zip(outputs, ends, strict=True)]


@pytest.fixture
def searches(make_spec: MakeSpec) -> list[GroupSpec]:
    """With prompts that end before, at and behind borders of blocks."""
    specs = [make_spec(length, MAX_TOKENS) for length in (1, 4, 15, 16, 33)]
    sampling = replace(specs[0].sampling, beam_width=WIDTH, end_token_ids=ENDS)
    return [replace(each, sampling=sampling, choices=tuple(map(ChoiceSpec, range(WIDTH)))) for each in specs]


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
async def test_beams_are_those_of_transformers_at_every_block_size(
    open_bench: Any, model: Any, searches: list[GroupSpec], block_size: int
) -> None:
    async with open_bench(block_size, 2048 // block_size, max_seqs=20) as bench:
        assert await bench.complete(searches) == [expected(model, each) for each in searches]
        assert bench.worker.load().preemptions == 0


@pytest.mark.parametrize("block_size", [1, 4, 16])
async def test_beams_that_are_preempted_are_still_those_of_transformers(
    open_bench: Any, model: Any, searches: list[GroupSpec], block_size: int
) -> None:
    sampling = replace(searches[0].sampling, max_tokens=80, end_token_ids=frozenset())
    searches = [replace(each, sampling=sampling) for each in searches]
    num_blocks = (max(each.max_pool_tokens(block_size) for each in searches) + 24) // block_size
    async with open_bench(block_size, num_blocks, max_seqs=20, chunk_tokens=16) as bench:
        assert await bench.complete(searches) == [expected(model, each) for each in searches]
        assert bench.worker.load().preemptions > 0
