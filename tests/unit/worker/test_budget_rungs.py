"""Where steps are padded to rungs, decodes and chunk fill one: only the end of a prompt is padded."""

from __future__ import annotations

import random

import pytest

from engine.graph_shapes import token_rungs
from worker.budget import ChunkBudget

RUNGS = token_rungs(2048)


def budgets(rungs: tuple[int, ...], rng: random.Random, chunk_tokens: int = 2048) -> ChunkBudget:
    """After steps of a worker whose prompts take 23.5 us a token, beside decode steps of 6 ms and more."""
    budget = ChunkBudget(chunk_tokens, rng.choice((None, 0.0, 0.03)), rng.choice((3.0, 50.0)), rungs=rungs)
    for _ in range(rng.randrange(60)):
        num_decodes, num_tokens = rng.randint(1, 256), rng.randint(1, 2048)
        budget.step_took(num_decodes, 0, 0.006 + num_decodes * 5e-5)
        budget.step_took(num_decodes, num_tokens, 0.006 + num_decodes * 5e-5 + num_tokens * 23.5e-6)
    return budget


@pytest.mark.parametrize("seed", range(50))
def test_a_mixed_step_is_as_long_as_a_rung(seed: int) -> None:
    budget, plain = (budgets(rungs, random.Random(seed)) for rungs in (RUNGS, ()))
    rng = random.Random(seed)
    for _ in range(20):
        now = rng.randint(1, 512), rng.uniform(0, 5)
        total, without = now[0] + budget.tokens(*now), now[0] + plain.tokens(*now)
        assert total in RUNGS
        assert total > now[0], "prompts advance"
        smallest = min(rung for rung in RUNGS if rung > now[0])
        assert total == max([rung for rung in RUNGS if smallest <= rung <= without], default=smallest)


def test_a_step_of_more_decodes_than_the_last_rung_has_tokens_is_not_padded() -> None:
    budget, plain = ChunkBudget(512, rungs=(64, 128)), ChunkBudget(512)
    assert budget.tokens(128, 0) == plain.tokens(128, 0)
    assert budget.tokens(127, 0) == 1


def test_a_chunk_is_never_longer_than_was_asked_for() -> None:
    assert ChunkBudget(16, 0.0, rungs=(64,)).tokens(3, 1) == 16
    assert ChunkBudget(2048, rungs=RUNGS).tokens(0, 1) == 2048
