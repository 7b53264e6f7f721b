"""What the sampler draws: greedy, adjusted, truncated, and with which log-probabilities."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.draws import SampleSpec
from engine.step import BrokenLogits
from tandem.types import SamplingParams, TokenId
from tests.drawing import drawing_kernels, history, sample

CHI_SQUARE_P = 1e-6
"""The seeds are fixed: a test that passes once passes for ever."""


def spec(output_index: int = 0, prompt=(), output=(), **params) -> SampleSpec:
    return SampleSpec(SamplingParams(**{"max_tokens": 99, **params}), output_index, history(prompt, output))


def random_logits(rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def draw(logits: torch.Tensor, specs: list[SampleSpec]) -> list[int]:
    return [token.token_id for (token,) in sample(logits, specs)]


def draw_many(row: torch.Tensor, count: int, **params) -> torch.Tensor:
    specs = [spec(output_index=index, **{"seed": 5, **params}) for index in range(count)]
    return torch.tensor(draw(row.expand(count, -1), specs))


def p_value(drawn: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Chi-square goodness of fit; cells expected less than 5 times are pooled."""
    expected = probabilities.double() * len(drawn)
    observed = torch.bincount(drawn, minlength=len(probabilities)).double()
    small = expected < 5
    expected = torch.cat((expected[~small], expected[small].sum()[None]))
    observed = torch.cat((observed[~small], observed[small].sum()[None]))
    if expected[-1] == 0:
        assert observed[-1] == 0
        expected, observed = expected[:-1], observed[:-1]
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2))


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-6])
@pytest.mark.parametrize("vocab_size", [5, 128, 300, 4096])
def test_at_temperature_zero_or_near_it_the_best_token_is_drawn(vocab_size: int, temperature: float) -> None:
    logits = random_logits(7, vocab_size)
    assert draw(logits, [spec(temperature=temperature, seed=n) for n in range(7)]) == logits.argmax(-1).tolist()


class CountingRowMax:
    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        best = rows.float().max(-1)
        return torch.where(best.values.isfinite(), best.indices, -1)


def test_best_tokens_come_from_the_kernels_maximum_if_no_row_wants_more() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    row_max = CountingRowMax()
    greedy, more = spec(temperature=0.0), (spec(temperature=1.0), spec(temperature=0.0, logprobs=0))
    kernels = drawing_kernels(row_max=row_max)
    assert sample(logits, [greedy] * 3, kernels) == sample(logits.float(), [greedy] * 3)
    assert row_max.num_calls == 1
    assert sample(logits, [greedy, *more], kernels) == sample(logits.float(), [greedy, *more])
    assert sample(logits[:1], [spec(temperature=0.0, logit_bias={7: 30.0})], kernels)[0][0].token_id == 7
    assert row_max.num_calls == 1


def test_the_kernels_maximum_does_not_hide_broken_rows() -> None:
    logits = torch.zeros(3, 50)
    logits[1] = -torch.inf
    (first,), broken, (last,) = sample(logits, [spec(temperature=0.0)] * 3, drawing_kernels(row_max=CountingRowMax()))
    assert (first.token_id, broken, last.token_id) == (0, BrokenLogits(), 0)


def test_the_lowest_of_equally_good_tokens_is_taken() -> None:
    logits = torch.zeros(3, 1000)
    logits[1, [130, 131, 900]] = 1.0
    logits[2, [999, 400]] = 1.0
    assert draw(logits, [spec(temperature=0.0)] * 3) == [0, 130, 400]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_strongest_penalties_and_biases_that_pass_leave_something_to_draw_from(temperature: float) -> None:
    logits = random_logits(4, 300)
    logits[:2] = logits[:2].sign() * torch.finfo(torch.float16).max
    seen = tuple(range(300))
    params = {"temperature": temperature, "presence_penalty": -2.0, "logit_bias": {TokenId(3): 100.0}}
    specs = [spec(repetition_penalty=r, output=seen, **params) for r in (0.01, 100.0, 0.01, 100.0)]
    assert BrokenLogits() not in sample(logits, specs)


def test_the_logits_stay_as_they_are() -> None:
    logits = random_logits(2, 300)
    before = logits.clone()
    sample(logits, [spec(top_k=5, top_p=0.5, logprobs=3, logit_bias={1: 2.0}, output=(4,), presence_penalty=1.0)] * 2)
    assert torch.equal(logits, before)


def test_the_chi_square_test_tells_a_wrong_distribution() -> None:
    row = random_logits(1, 50)
    assert p_value(draw_many(row, 4000, temperature=1.1), row[0].softmax(-1)) < CHI_SQUARE_P


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 10_000},
        {"top_p": 0.3},
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"top_p": 1e-9},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"top_k": 40, "top_p": 0.8},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.05, "temperature": 0.7},
    ],
)
@pytest.mark.parametrize("vocab_size", [60, 1999])
def test_filtered_draws_follow_the_distribution_of_transformers(params: dict[str, float], vocab_size: int) -> None:
    row = random_logits(1, vocab_size, seed=3)
    scores = TemperatureLogitsWarper(params.get("temperature", 1.0))(None, row)
    if "top_k" in params:
        scores = TopKLogitsWarper(params["top_k"])(None, scores)
    if "top_p" in params:
        scores = TopPLogitsWarper(params["top_p"])(None, scores)
    if "min_p" in params:
        scores = MinPLogitsWarper(params["min_p"])(None, scores)
    expected = scores.softmax(-1)[0]
    drawn = draw_many(row, 3000, **params)
    assert (expected[drawn] > 0).all(), "a token outside the support was drawn"
    if (expected > 0).sum() > 1:
        assert p_value(drawn, expected) > CHI_SQUARE_P
    likely = (expected > 0.01).nonzero()[:, 0].tolist()
    assert set(likely) <= set(drawn.tolist())


def test_a_nucleus_wider_than_the_first_guesses_is_found_whole() -> None:
    row = random_logits(1, 3000, seed=1) * 0.1  # nearly even: 0.9 of the mass takes over 2500 tokens
    expected = TopPLogitsWarper(0.9)(None, row).softmax(-1)[0]
    drawn = draw_many(row, 600, top_p=0.9)
    assert (expected[drawn] > 0).all()
    assert len(set(drawn.tolist())) > 500


def test_equal_scores_at_the_border_of_a_filter_stay_together() -> None:
    row = torch.full((1, 200), -50.0)
    row[0, [10, 20, 30]] = 0.0
    assert set(draw_many(row, 200, top_k=2).tolist()) == {10, 20, 30}
    assert set(draw_many(row, 200, top_p=0.5).tolist()) == {10, 20, 30}


def test_each_row_of_a_batch_is_cut_at_its_own_k() -> None:
    row = torch.linspace(0.0, -0.5, 300)[None]
    drawn = draw(row.expand(900, -1), [spec(output_index=n, top_k=n % 3 + 1) for n in range(900)])
    assert [set(drawn[k::3]) for k in range(3)] == [{0}, {0, 1}, {0, 1, 2}]


def test_a_nucleus_that_needs_all_of_top_k_takes_nothing_beyond_it() -> None:
    logits = random_logits(1500, 300, seed=4) * 0.1
    drawn = draw(logits, [spec(output_index=n, top_k=2, top_p=1 - 1e-12) for n in range(1500)])
    best_two = logits.topk(2).indices.tolist()
    assert all(token in best for token, best in zip(drawn, best_two, strict=True))


def test_a_nucleus_ends_where_its_mass_is_just_reached() -> None:
    row = torch.full((1, 300), -torch.inf)
    row[0, [5, 6, 7]] = torch.tensor([1.0, 0.5, 0.5]).log()
    assert set(draw_many(row, 200, top_p=0.5).tolist()) == {5}


def test_a_token_without_weight_is_never_drawn() -> None:
    row = torch.full((1, 300), -torch.inf)
    row[0, [0, 127, 299]] = torch.tensor([0.0, 1.0, 0.5])
    assert set(draw_many(row, 500).tolist()) == {0, 127, 299}


def test_seed_and_position_decide_the_draw_and_nothing_else() -> None:
    row = random_logits(1, 5000) * 0.1
    base = draw(row, [spec(seed=1, output_index=3)])
    assert draw(row, [spec(seed=1, output_index=3)]) == base
    others = [spec(seed=2, output_index=3), spec(seed=1, output_index=4)]
    assert all(draw(row, [other]) != base for other in others)


def test_logprobs_are_those_of_the_raw_logits_best_first() -> None:
    logits = random_logits(3, 300)
    raw = logits.double().log_softmax(-1)
    params = {"temperature": 0.7, "top_k": 2, "logit_bias": {TokenId(4): 5.0}, "logprobs": 5}
    for row, (token,) in enumerate(sample(logits, [spec(seed=n, **params) for n in range(3)])):
        assert token.logprobs is not None
        assert token.logprobs.token_id == token.token_id
        assert token.logprobs.logprob == pytest.approx(float(raw[row, token.token_id]), abs=1e-5)
        values, indices = raw[row].topk(5)
        assert [token_id for token_id, _ in token.logprobs.top] == indices.tolist()
        assert [logprob for _, logprob in token.logprobs.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_each_row_gets_the_logprobs_that_it_asked_for() -> None:
    tokens = [token for (token,) in sample(random_logits(4, 300), [spec(logprobs=n) for n in (None, 0, 3, 1)])]
    assert tokens[0].logprobs is None
    assert [len(token.logprobs.top) for token in tokens[1:] if token.logprobs] == [0, 3, 1]


def test_more_logprobs_than_the_vocabulary_has_are_all_of_it() -> None:
    ((token,),) = sample(random_logits(1, 10), [spec(logprobs=20)])
    assert token.logprobs is not None
    assert len(token.logprobs.top) == 10


MIXES = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"top_p": 0.8},
    {"min_p": 0.02, "temperature": 1.3},
    {"top_k": 300},
    {"repetition_penalty": 1.2, "logit_bias": {TokenId(3): 1.0}},
    {"temperature": 0.0, "logprobs": 4},
    {"logprobs": 2, "top_p": 0.99},
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_whose_logits_are_not_finite_is_broken_and_the_others_draw_as_ever(
    temperature: float, bad: float
) -> None:
    specs = [spec(output_index=n, prompt=(1, 2), output=(3, n), **mix) for n, mix in enumerate(MIXES * 2)]
    logits = random_logits(len(specs), 300)
    expected = sample(logits, specs)
    for row, params in ((0, {}), (5, {"logprobs": 3}), (9, {"top_p": 0.5, "top_k": 3}), (17, {"min_p": 0.1})):
        logits[row, 200] = bad
        specs[row] = spec(temperature=temperature, **params)
        expected[row] = BrokenLogits()
    assert sample(logits, specs) == expected


def test_a_row_that_may_draw_nothing_is_broken_alone() -> None:
    forbidden = spec(min_tokens=1, end_token_ids=frozenset(map(TokenId, range(300))))
    assert [type(drawn) for drawn in sample(random_logits(2, 300), [forbidden, spec()])] == [BrokenLogits, tuple]


@pytest.mark.parametrize("vocab_size", [333, 1024, 5003, 49157])  # the last in several tiles
def test_a_row_draws_the_same_alone_and_in_any_batch(vocab_size: int) -> None:
    count = 45
    logits = random_logits(count, vocab_size, seed=9)
    specs = [
        spec(output_index=n, seed=n % 7, prompt=(1, 2), output=(3, n), **MIXES[n % len(MIXES)]) for n in range(count)
    ]
    together = sample(logits, specs)
    alone = [sample(logits[n : n + 1], specs[n : n + 1])[0] for n in range(count)]
    assert together == alone
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()
    assert sample(logits[order], [specs[n] for n in order]) == [together[n] for n in order]
