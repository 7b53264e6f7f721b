"""Draws of the k best tokens, as transformers' beam search scores them, and draws under a token mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from engine.draws import Draws, SampleSpec, TokenMask
from engine.sampler import draw, plan_draws
from engine.step import BrokenLogits
from tandem.errors import InternalError
from tandem.types import SamplingParams, TokenId
from tests.drawing import TORCH, history, sample

VOCAB_SIZE = 300
CPU = torch.device("cpu")


def spec(num_candidates: int = 0, mask: TokenMask | None = None, prompt=(), output=(), **params) -> SampleSpec:
    sampling = SamplingParams(**{"max_tokens": 99, **params})
    return SampleSpec(sampling, len(output), history(prompt, output), num_candidates=num_candidates, mask=mask)


def mask_of(*allowed: int, vocab_size: int = VOCAB_SIZE) -> TokenMask:
    words = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
    for token_id in allowed:
        words[token_id // 32] |= np.uint32(1 << (token_id % 32))
    return words


def random_logits(rows: int, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def pairs(sampled) -> list[tuple[int, float]]:
    assert all(each.logprobs.token_id == each.token_id for each in sampled)
    return [(each.token_id, each.logprobs.logprob) for each in sampled]


def assert_close(sampled, expected: list[tuple[int, float]]) -> None:
    assert [token_id for token_id, _ in pairs(sampled)] == [token_id for token_id, _ in expected]
    assert [score for _, score in pairs(sampled)] == pytest.approx([score for _, score in expected], abs=2e-6)


def best(scores: torch.Tensor, count: int) -> list[tuple[int, float]]:
    values, indices = scores.topk(count)
    return list(zip(indices.tolist(), values.tolist(), strict=True))


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 5000])
@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_candidates_are_the_best_by_log_softmax_whatever_the_temperature(vocab_size, temperature) -> None:
    logits = random_logits(2, vocab_size)
    drawn = sample(logits, [spec(8, temperature=temperature, top_k=1, top_p=0.1), spec(3)])
    for sampled, row, count in zip(drawn, logits.double().log_softmax(-1), (8, 3), strict=True):
        assert_close(sampled, best(row, count))


def test_penalties_change_log_probabilities_as_in_transformers_beam_search() -> None:
    logits = random_logits(1)
    scores = RepetitionPenaltyLogitsProcessor(1.6)(torch.tensor([[5, 9, 120]]), logits.log_softmax(-1))
    scores[0, 44] += 2.5
    scores[0, [9, 120]] -= 0.5
    given = {"repetition_penalty": 1.6, "presence_penalty": 0.5, "logit_bias": {TokenId(44): 2.5}}
    (sampled,) = sample(logits, [spec(6, prompt=(5,), output=(9, 120), **given)])
    assert_close(sampled, best(scores[0], 6))


def test_candidates_and_tokens_are_drawn_from_one_row_as_from_rows_of_their_own() -> None:
    logits = random_logits(2)
    specs = [spec(4), spec(seed=3), spec(seed=4, logprobs=2), spec(temperature=0.0), spec(2, mask_of(1, 2, 3))]
    rows = torch.tensor([1, 0, 1, 0, 1])
    expected = sample(logits[rows], specs)
    drawn = draw(logits, plan_draws(Draws.of(specs), TORCH, CPU), rows, {}).read()
    assert [drawn[number] for number in range(len(specs))] == expected
    alone = [sample(logits[row : row + 1], [each])[0] for row, each in zip(rows, specs, strict=True)]
    assert alone == expected


def test_what_a_draw_of_candidates_feeds_is_the_best() -> None:
    drawn = draw(random_logits(1), plan_draws(Draws.of([spec(4)]), TORCH, CPU), None, {})
    first, *_ = drawn.read().more[0]
    assert drawn.token_ids.tolist() == [first.token_id]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_broken_logits_have_no_candidates_and_harm_no_others(bad: float) -> None:
    logits = random_logits(3)
    expected = sample(logits, [spec(3)] * 3)
    logits[1, 7] = bad
    assert sample(logits, [spec(3)] * 3) == [expected[0], BrokenLogits(), expected[2]]


@pytest.mark.parametrize("vocab_size", [31, 32, 33, VOCAB_SIZE])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_drawn(vocab_size: int, temperature: float) -> None:
    allowed = {0, 30, vocab_size - 1}
    mask = mask_of(*allowed, vocab_size=vocab_size)
    specs = [spec(mask=mask, temperature=temperature, seed=seed) for seed in range(200)]
    drawn = [token.token_id for (token,) in sample(random_logits(1, vocab_size).expand(200, -1) / 9, specs)]
    assert set(drawn) <= allowed
    assert (len(set(drawn)) > 1) == (temperature > 0)


def test_a_mask_leaves_other_rows_and_raw_log_probabilities_as_they_are() -> None:
    logits = random_logits(2)
    specs = [spec(seed=1, logprobs=2), spec(seed=1, logprobs=2, mask=mask_of(*range(0, VOCAB_SIZE, 7)))]
    free, (masked,) = sample(logits, specs)
    assert free == sample(logits[:1], specs[:1])[0]
    assert masked.token_id % 7 == 0
    assert masked.logprobs is not None
    assert masked.logprobs.logprob == pytest.approx(float(logits[1].log_softmax(-1)[masked.token_id]), abs=1e-5)


def test_a_mask_that_allows_all_changes_no_token() -> None:
    logits = random_logits(20)
    full = np.full(-(-VOCAB_SIZE // 32), 0xFFFFFFFF, dtype=np.uint32)
    plain = [spec(seed=n, temperature=n % 2) for n in range(20)]
    masked = [spec(seed=n, temperature=n % 2, mask=full) for n in range(20)]
    assert sample(logits, masked) == sample(logits, plain)


def test_fewer_candidates_where_the_mask_leaves_fewer_and_broken_where_it_leaves_none() -> None:
    two, none = sample(random_logits(2), [spec(5, mask_of(7, 250)), spec(5, mask_of())])
    assert not isinstance(two, BrokenLogits)
    assert sorted(each.token_id for each in two) == [7, 250]
    assert none == BrokenLogits()
    assert sample(random_logits(1), [spec(mask=mask_of())]) == [BrokenLogits()]


def test_words_unpacked_on_a_device_are_those_unpacked_on_the_host() -> None:
    from engine.penalties import TokenMasks

    words = np.random.default_rng(0).integers(0, 2**32, (3, 10), dtype=np.uint32)
    on_host = TokenMasks.of([*enumerate(words)], CPU)
    assert on_host is not None
    packed = TokenMasks(on_host.draws, torch.from_numpy(words.view(np.int32)))
    unpacked, expected = torch.zeros(3, 310), torch.zeros(3, 310)
    packed.apply(unpacked)
    on_host.apply(expected)
    assert torch.equal(unpacked, expected)
    assert bool((unpacked == 0).any())


def test_masks_of_a_wrong_width_are_refused() -> None:
    with pytest.raises(InternalError, match="320 bits for a vocabulary of 400"):
        sample(random_logits(1, 400), [spec(mask=mask_of(1))])
    with pytest.raises(InternalError, match="words in one step"):
        sample(random_logits(2), [spec(mask=mask_of(1)), spec(mask=mask_of(1, vocab_size=64))])
