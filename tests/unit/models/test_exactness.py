"""Logits and greedy tokens equal transformers', however prompts are cut and batched."""

from __future__ import annotations

import pytest
import torch

from bench.support.tiny_models import TINY_MODELS
from kernels.compiled_step import StepInputs
from kernels.dispatch import select_kernels
from models.loading import load_model
from tests.paged_driver import (
    PagedDriver,
    PagedSeq,
    load_tiny,
    load_transformers,
    random_prompt,
    reference_tokens,
    transformers_logits,
)

BESIDE_WEIGHTS = [
    tiny
    for tiny in TINY_MODELS
    if tiny.name in {"gemma2-caps", "gemma3", "gpt-oss", "granite", "olmo2", "qwen2-moe", "smollm3-windowed"}
]
"""Whose layers compute more than products, norms, rotation and attention."""
BORDERS = ((1, 64), (16, 64), (64, 512))
"""Block size and tokens of a step."""
AT_EVERY_BORDER = [*BESIDE_WEIGHTS, *(tiny for tiny in TINY_MODELS if tiny.name in {"llama", "qwen2"})]


@pytest.fixture(scope="module", params=TINY_MODELS, ids=lambda tiny: tiny.name)
def tiny(request):
    return request.param


@pytest.fixture(scope="module")
def reference(checkpoint, tiny):
    return load_transformers(checkpoint(tiny))


@pytest.fixture(scope="module")
def model(checkpoint, tiny):
    return load_tiny(checkpoint(tiny), "float32")


def full_logits(model, token_ids, block_size=16, chunk_tokens=None):
    driver = PagedDriver(model, block_size, 4 + -(-len(token_ids) // block_size))
    seq = PagedSeq(list(token_ids))
    logits = []
    while seq.num_computed_tokens < len(token_ids):
        rest = len(token_ids) - seq.num_computed_tokens
        logits.append(driver.step([(seq, min(chunk_tokens or rest, rest))]))
    return torch.cat(logits)


def test_float32_logits_are_those_of_transformers(reference, model):
    token_ids = random_prompt(130)
    expected = transformers_logits(reference, token_ids)
    assert expected.std() > 1  # spread enough to tell tokens apart
    logits = full_logits(model, token_ids)
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


def test_chunks_give_the_logits_of_the_whole_prompt(model):
    token_ids = random_prompt(130)
    whole = full_logits(model, token_ids)
    torch.testing.assert_close(full_logits(model, token_ids, 16, 48), whole, atol=2e-4, rtol=1e-4)
    one_by_one = full_logits(model, token_ids[:60], 1, 1)  # beyond every window
    torch.testing.assert_close(one_by_one, whole[:60], atol=2e-4, rtol=1e-4)


def test_greedy_tokens_are_those_of_transformers(reference, model, tiny):
    prompts = [random_prompt(length) for length in (1, 15, 16, 17, 63, 64, 65, 129)]
    expected = [reference_tokens(reference, prompt, 24) for prompt in prompts]
    place = TINY_MODELS.index(tiny) % len(BORDERS)
    for block_size, chunk_tokens in BORDERS if tiny in AT_EVERY_BORDER else BORDERS[place:][:1]:
        driver = PagedDriver(model, block_size, 800)
        assert driver.generate(prompts, 24, chunk_tokens) == expected, (block_size, chunk_tokens)


def test_only_sampled_rows_have_logits(model):
    driver = PagedDriver(model, 16, 4)
    driver.step([(PagedSeq(random_prompt(20)), 20)])
    metadata = driver._metadata([(PagedSeq([1], block_table=[0]), 1)], [range(1)])
    one = torch.zeros(1, dtype=torch.int64)
    none = model.decoder.forward(StepInputs(one, one, driver._kv_cache, metadata, torch.empty(0, dtype=torch.int64)))
    assert none.shape == (0, model.config.vocab_size)


def test_bfloat16_is_as_close_to_float64_as_transformers_is(checkpoint, tiny):
    folder = checkpoint(tiny)
    token_ids = random_prompt(200)
    reference = load_transformers(folder, torch.bfloat16)
    theirs = transformers_logits(reference, token_ids)
    oracle = transformers_logits(reference.double(), token_ids)
    ours = full_logits(load_tiny(folder, "bfloat16"), token_ids, chunk_tokens=64)
    assert ours.dtype == torch.bfloat16
    our_error = (ours.double() - oracle).pow(2).mean().sqrt()
    their_error = (theirs.double() - oracle).pow(2).mean().sqrt()
    assert our_error <= 1.2 * their_error


@pytest.mark.parametrize("tiny", BESIDE_WEIGHTS, ids=lambda tiny: tiny.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_has_the_same_bits_alone_and_beside_others(checkpoint, tiny, dtype):
    cpu = torch.device("cpu")
    model = load_model(checkpoint(tiny), dtype, cpu, select_kernels("auto", cpu, getattr(torch, dtype)))
    prompt, others = random_prompt(40), [random_prompt(n) for n in (3, 60, 17)]

    def logits(beside):
        work = [(PagedSeq(list(each)), len(each)) for each in (prompt, *beside)]
        return PagedDriver(model, 16, 40).step(work)[: len(prompt)]

    assert torch.equal(logits([]), logits(others))
