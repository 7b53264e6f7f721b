"""Beam search against transformers' own `generate`, and against a plain model that looks at every continuation."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.support.tiny_models import TINY_MODELS, VOCAB_SIZE, build_tiny_model
from engine.beam import BeamSearch, num_candidates
from tandem.errors import InternalError
from tandem.types import Candidates, EarlyStopping, FinishReason, SamplingParams, TokenId

EARLY_STOPPING = {EarlyStopping.HEURISTIC: False, EarlyStopping.ALWAYS: True, EarlyStopping.NEVER: "never"}


def params_of(width: int, max_tokens: int, ends: Sequence[int] = (), **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, beam_width=width, end_token_ids=frozenset(map(TokenId, ends)), **more)


def candidates_of(row: Sequence[float], count: int) -> Candidates:
    """The best of a row of log-probabilities, equal ones by id."""
    order = sorted(range(len(row)), key=lambda token_id: (-row[token_id], token_id))[:count]
    return tuple((TokenId(token_id), row[token_id]) for token_id in order if row[token_id] > -math.inf)


def run(search: BeamSearch, params: SamplingParams, rows_of: Any) -> list[tuple[tuple[int, ...], float]]:
    """Every completion that is kept, best first; `rows_of` gives a row of log-probabilities for each beam."""
    beams: list[tuple[int, ...]] = [()]
    while not search.is_done:
        drawn = [candidates_of(row, num_candidates(params)) for row in rows_of(beams)]
        beams = [(*beams[parent], token_id) for parent, token_id in search.advance(drawn)]
    found = [search.best(index) for index in range(params.beam_width)]
    return [(tuple(each.token_id for each in one.tokens), one.score) for one in found]


@pytest.fixture(scope="module")
def model() -> Any:
    return build_tiny_model(TINY_MODELS[0])


@pytest.mark.parametrize("width", [2, 3, 5, 8])
@pytest.mark.parametrize("early_stopping", EarlyStopping)
@pytest.mark.parametrize("num_ends", [0, 1, 24])
def test_completions_order_and_scores_are_those_of_transformers(
    model: Any, width: int, early_stopping: EarlyStopping, num_ends: int
) -> None:
    rng = random.Random(f"{width}-{early_stopping}-{num_ends}")
    for length_penalty in (-1.0, 0.0, 0.5, 1.0, 2.0):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(9)]
        ends = rng.sample(range(VOCAB_SIZE), num_ends)
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=12,
            length_penalty=length_penalty,
            early_stopping=EARLY_STOPPING[early_stopping],
            eos_token_id=ends or None,
            pad_token_id=ends[0] if ends else 0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        expected = [
            (_cut(tokens[len(prompt) :].tolist(), ends), score)
            for tokens, score in zip(out.sequences, out.sequences_scores.tolist(), strict=True)
        ]
        params = params_of(width, 12, ends, length_penalty=length_penalty, early_stopping=early_stopping)

        def rows_of(beams: Sequence[tuple[int, ...]], prompt: Sequence[int] = prompt) -> list[list[float]]:
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *beam] for beam in beams])).logits[:, -1]
            rows: list[list[float]] = logits.float().log_softmax(-1).tolist()
            return rows

        found = run(BeamSearch(params), params, rows_of)

        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        assert [score for _, score in found] == pytest.approx([score for _, score in expected], rel=1e-5)


def _cut(tokens: list[int], ends: Sequence[int]) -> tuple[int, ...]:
    """transformers fills up with padding behind the token that ends it."""
    at = next((i for i, token_id in enumerate(tokens) if token_id in ends), len(tokens) - 1)
    return tuple(tokens[: at + 1])


def plain_search(params: SamplingParams, rows_of: Any) -> list[tuple[tuple[int, ...], float]]:
    """The same by its definition: every continuation of every beam, sorted; float32 throughout."""
    width = params.beam_width
    beams = [((), np.float32(0))]
    finished: list[tuple[tuple[int, ...], np.float32]] = []
    for length in itertools.count(1):
        rows = rows_of([tokens for tokens, _ in beams])
        ranked = sorted(
            (-(score + np.float32(row[token_id])), place, -row[token_id], token_id)
            for place, ((_, score), row) in enumerate(zip(beams, rows, strict=True))
            for token_id in range(len(row))
            if row[token_id] > -math.inf
        )
        going, ending = [], []
        for rank, (negative, place, _, token_id) in enumerate(ranked):
            tokens = (*beams[place][0], token_id)
            if length < params.max_tokens and token_id not in params.end_token_ids:
                going.append((tokens, -negative))
            elif rank < width:
                ending.append((tokens, np.float32(-negative) / np.float32(float(length) ** params.length_penalty)))
        finished = sorted(finished + ending, key=lambda each: -each[1])[:width]
        beams = going[:width]
        hoped = (
            params.max_tokens if params.early_stopping is EarlyStopping.NEVER and params.length_penalty > 0 else length
        )
        if not beams or (
            len(finished) == width
            and (
                params.early_stopping is EarlyStopping.ALWAYS
                or not beams[0][1] / np.float32(float(hoped) ** params.length_penalty) > finished[-1][1]
            )
        ):
            return [(tokens, float(score)) for tokens, score in finished]
    raise AssertionError


@settings(max_examples=300, deadline=None)
@given(
    width=st.integers(2, 8),
    max_tokens=st.integers(1, 7),
    vocab_size=st.integers(16, 24),
    ends=st.sets(st.integers(0, 15), max_size=6),
    early_stopping=st.sampled_from(EarlyStopping),
    length_penalty=st.sampled_from([-2.0, -0.5, 0.0, 0.3, 1.0, 3.0]),
    levels=st.sampled_from([3, 50, 10_000]),
    seed=st.integers(0, 2**32),
)
def test_the_best_few_of_each_beam_are_enough(
    width: int,
    max_tokens: int,
    vocab_size: int,
    ends: set[int],
    early_stopping: EarlyStopping,
    length_penalty: float,
    levels: int,
    seed: int,
) -> None:
    """With few levels most log-probabilities are equal, with many none."""
    params = params_of(width, max_tokens, sorted(ends), early_stopping=early_stopping, length_penalty=length_penalty)

    def row_of(tokens: tuple[int, ...]) -> list[float]:
        rng = random.Random(f"{seed}-{tokens}")
        return [float(np.float32(-rng.randrange(1, levels) * 5 / levels)) for _ in range(vocab_size)]

    def rows_of(beams: Sequence[tuple[int, ...]]) -> list[list[float]]:
        return [row_of(tokens) for tokens in beams]

    assert run(BeamSearch(params), params, rows_of) == plain_search(params, rows_of)


def test_a_search_with_one_step_ends_by_length_and_by_an_end_token() -> None:
    search = BeamSearch(params_of(2, 1, (7,), logprobs=1))

    assert search.advance([((TokenId(3), -0.5), (TokenId(7), -1.0), (TokenId(1), -2.0))]) == ()

    assert search.is_done
    assert [search.best(i).finish_reason for i in range(2)] == [FinishReason.LENGTH, FinishReason.STOP]
    assert search.best(1).score == -1.0
    assert search.best(1).tokens[0].top == ((TokenId(3), -0.5),)


def test_where_few_completions_exist_the_last_stands_for_those_that_are_missing() -> None:
    search = BeamSearch(params_of(4, 5, (7,)))

    search.advance([((TokenId(7), -1.0),)])

    assert search.is_done
    assert [len(search.best(i).tokens) for i in range(4)] == [1, 1, 1, 1]


@pytest.mark.parametrize("length_penalty", [-10.0, 10.0])
def test_scores_stay_finite_at_the_ends_of_the_range(length_penalty: float) -> None:
    params = params_of(2, 3000, (7,), length_penalty=length_penalty, early_stopping=EarlyStopping.NEVER)
    row = [-float(i + 1) for i in range(10)]

    for _, score in run(BeamSearch(params), params, lambda beams: [row] * len(beams)):
        assert math.isfinite(score)


def test_candidates_of_another_number_of_beams_are_refused() -> None:
    with pytest.raises(InternalError, match="candidates of 2 beams, not of 1"):
        BeamSearch(params_of(2, 4)).advance([(), ()])
