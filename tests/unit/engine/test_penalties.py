"""Penalties, biases and min_tokens of a step's rows, changed together: each row as it would be by itself."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from engine.draws import Draws, SampleSpec
from engine.penalties import LogitChanges
from engine.sampler import draw, plan_draws
from tandem.errors import InternalError
from tandem.types import SamplingParams, TokenId
from tests.drawing import TORCH, history

CPU = torch.device("cpu")
VOCAB_SIZE = 400
ENDS = frozenset({TokenId(2), TokenId(9)})


class CountCalls(TorchDispatchMode):
    """Counts torch calls; to wrap a numpy array is none."""

    num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += func is not torch.ops.aten.lift_fresh.default
        return func(*args, **(kwargs or {}))


def change_alone(row: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> None:
    """The definition (`engine.penalties`), one row and one kind at a time."""
    for token_id, bias in params.logit_bias.items():
        row[token_id] += bias
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(np.array([*prompt, *output], dtype=np.int64)))
        logits = row[seen]
        row[seen] = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and output:
        ids, counts = np.unique(np.array(output, dtype=np.int64), return_counts=True)
        loss = params.presence_penalty + params.frequency_penalty * counts
        row[torch.from_numpy(ids)] -= torch.from_numpy(loss).to(row.dtype)
    if len(output) < params.min_tokens:
        row[sorted(params.end_token_ids)] = -torch.inf


def random_params(rng: random.Random) -> SamplingParams:
    """Any of the kinds, or none."""
    return SamplingParams(
        max_tokens=99,
        repetition_penalty=rng.choice([1.0, 0.7, 1.3, 1.17]),
        presence_penalty=rng.choice([0.0, 0.3, -1.1]),
        frequency_penalty=rng.choice([0.0, 0.1, -0.7]),
        logit_bias={TokenId(rng.randrange(VOCAB_SIZE)): rng.uniform(-3, 3) for _ in range(rng.choice([0, 0, 3]))},
        min_tokens=rng.choice([0, 6]),
        end_token_ids=ENDS,
    )


def tokens(rng: random.Random, at_most: int) -> list[int]:
    return [int(rng.triangular(0, VOCAB_SIZE, 0)) for _ in range(rng.randrange(at_most))]


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_changed_together_bit_for_bit_as_each_would_be_alone(seed: int) -> None:
    rng = random.Random(seed)
    rows = [(random_params(rng), tokens(rng, 50), tokens(rng, 40)) for _ in range(rng.choice([1, 12]))]
    logits = torch.randn(len(rows), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3
    drawn = [*tokens(rng, 9), 5, -1]
    fed_by = {
        n: rng.randrange(len(drawn) - 1) for n, (_, _, output) in enumerate(rows) if output and rng.random() < 0.5
    }
    for number, by in fed_by.items():
        if rng.random() < 0.3:
            drawn[by] = rows[number][2][0]  # one that the completion has already
    expected = logits.clone()
    for number, (row, (params, prompt, output)) in enumerate(zip(expected, rows, strict=True)):
        fed = [drawn[fed_by[number]]] if number in fed_by else []
        change_alone(row, params, prompt, [*output, *fed])
    specs = [
        SampleSpec(params, len(output) + (number in fed_by), history(prompt, output))
        for number, (params, prompt, output) in enumerate(rows)
    ]
    changes = LogitChanges.of([*enumerate(specs)], fed_by, CPU)
    if changes is not None:
        changes.apply(logits, torch.tensor(drawn))
    assert torch.equal(logits, expected)


@pytest.mark.parametrize(("is_fed", "most"), [(False, 20), (True, 35)])
def test_torch_is_called_as_often_for_many_penalised_rows_as_for_one(is_fed: bool, most: int) -> None:
    def num_calls(count: int) -> int:
        params = SamplingParams(
            max_tokens=99,
            temperature=0.0,
            repetition_penalty=1.2,
            presence_penalty=0.5,
            frequency_penalty=0.2,
            logit_bias={TokenId(4): 1.0},
            min_tokens=50,
            end_token_ids=ENDS,
        )
        specs = [SampleSpec(params, 3, history((1, 2, n), (5, 6, n))) for n in range(count)]
        plain = [spec._replace(params=SamplingParams(max_tokens=99, temperature=0.0)) for spec in specs]
        logits, drawn = torch.randn(count, VOCAB_SIZE), torch.arange(count)
        counts = []
        for each, fed_by in ((specs, {n: n for n in range(count)} if is_fed else {}), (plain, {})):
            with CountCalls() as mode:
                draw(logits, plan_draws(Draws.of(each), TORCH, CPU, fed_by), None, drawn)
            counts.append(mode.num_calls)
        return counts[0] - counts[1]

    assert num_calls(64) == num_calls(1) <= most


def test_a_broken_draw_that_was_to_be_fed_harms_no_other_row() -> None:
    params = SamplingParams(max_tokens=9, repetition_penalty=1.5, frequency_penalty=0.5)
    specs = [SampleSpec(params, 2, history((1,), (3,))) for _ in range(2)]
    logits = torch.randn(1, VOCAB_SIZE).repeat(2, 1)
    expected = logits[1].clone()
    change_alone(expected, params, [1], [3, 7])
    changes = LogitChanges.of([*enumerate(specs)], {0: 0, 1: 1}, CPU)
    assert changes is not None
    changes.apply(logits, torch.tensor([-1, 7]))
    assert torch.equal(logits[1], expected)


def test_a_penalty_without_its_history_is_refused() -> None:
    with pytest.raises(InternalError, match="without the tokens"):
        LogitChanges.of([(0, SampleSpec(SamplingParams(max_tokens=9, presence_penalty=1.0), 0))], {}, CPU)


@pytest.mark.parametrize("seed", range(4))
def test_biases_penalties_and_min_tokens_together_are_those_of_transformers(seed: int) -> None:
    """Of ids that are seen, biased and an end at once, too: there the order counts."""
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(seed)) * 5
    seen, ends, biases = (5, 9, 9, 12), (9, 30), {5: 4.0, 9: -2.5, 12: -6.0, 30: 9.0, 7: 3.0}
    ids = torch.tensor([seen])
    expected = SequenceBiasLogitsProcessor({(key,): value for key, value in biases.items()})(ids, logits)
    expected = RepetitionPenaltyLogitsProcessor(1.9)(ids, expected)
    expected = MinNewTokensLengthLogitsProcessor(2, 4, list(ends), CPU)(ids, expected)
    params = SamplingParams(
        max_tokens=9,
        repetition_penalty=1.9,
        logit_bias={TokenId(key): value for key, value in biases.items()},
        min_tokens=4,
        end_token_ids=frozenset(map(TokenId, ends)),
    )

    changes = LogitChanges.of([(0, SampleSpec(params, 2, history(seen[:2], seen[2:])))], {}, CPU)

    assert changes is not None
    changes.apply(logits, None)
    torch.testing.assert_close(logits, expected)
