"""Traces: rates, bursts, shared prefixes, files as Mooncake publishes them; and the fit of costs."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from statistics import mean, pstdev

import pytest

from simulator.costs import CostModel, StepCosts, StepWork, fit, read_costs
from simulator.traces import Dialogue, LogNormal, at_rate, conversation, independent, rate_of, read_jsonl
from tandem.errors import ConfigError

LENGTHS = LogNormal(100, 0.5, 1, 1000)


@pytest.mark.parametrize("variation", [1.0, 3.0])
def test_arrivals_have_the_rate_and_the_variation_asked_for(variation: float) -> None:
    trace = independent(LENGTHS, LENGTHS, 5.0, 20_000, seed=1, variation=variation)
    gaps = [after.at_s - before.at_s for before, after in pairwise(trace)]
    assert rate_of(trace) == pytest.approx(5.0, rel=0.06)
    assert pstdev(gaps) / mean(gaps) == pytest.approx(variation, rel=0.06)


def test_a_turn_begins_with_all_of_the_one_before() -> None:
    dialogue = Dialogue(32, LogNormal(3, 0, 3, 3), LogNormal(10, 0, 10, 10), LogNormal(5, 0, 5, 5), pause_s=1)
    trace = conversation(dialogue, 1.0, 60, seed=1)
    assert len(trace) == 60
    assert rate_of(trace) == pytest.approx(1.0, rel=0.3)
    assert {ask.prompt_tokens for ask in trace} == {42, 57, 72}
    last = next(ask for ask in reversed(trace) if len(ask.pieces) == 6)
    first = next(ask for ask in trace if len(ask.pieces) == 2 and ask.pieces[1] == last.pieces[1])
    assert last.token_ids()[: first.prompt_tokens] == first.token_ids()


def test_a_file_with_hash_ids_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 3000, "input_length": 1100, "output_length": 7, "hash_ids": [4, 5, 6]},
        {"timestamp": 1000, "input_length": 600, "output_length": 2, "hash_ids": [4]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    trace = read_jsonl(path)
    assert [ask.at_s for ask in trace] == [0.0, 2.0]
    assert [ask.prompt_tokens for ask in trace] == [600, 1100]
    shared = [before == after for before, after in zip(trace[0].token_ids(), trace[1].token_ids(), strict=False)]
    assert shared.index(False) == 512
    assert [ask.at_s for ask in at_rate(trace, 5.0)] == [0.0, 0.2]


@pytest.mark.parametrize("text", ["", "{}", "nonsense", '{"timestamp": 0, "input_length": 0, "output_length": 1}'])
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError):
        read_jsonl(path)


def test_the_fit_finds_the_numbers_that_made_the_steps() -> None:
    costs = StepCosts(0.01, 0.001, 2e-6, 1e-3, 3e-8)
    works = [StepWork(n, n * c, p, p * b) for n in (0, 1, 8) for c in (64, 900) for p in (0, 32, 512) for b in (0, 500)]
    fitted = fit([(work, costs.seconds(work)) for work in works if work.decodes or work.prompt_tokens])
    for name in StepCosts.__slots__:
        assert getattr(fitted.costs, name) == pytest.approx(getattr(costs, name), rel=1e-6, abs=1e-9)
    assert fitted.median_error < 1e-9


def test_the_fit_finds_how_much_arithmetic_reading_the_weights_hides() -> None:
    costs = StepCosts(0.01, 1e-3, 1e-6, 1e-3, 1e-8, hidden=8e-3)
    works = [
        StepWork(n, n * c, p, p * b)
        for n in (0, 1, 4, 8, 16)
        for p in (0, 4, 64, 512)
        for c, b in ((64, 0), (900, 500))
    ]
    fitted = fit([(work, costs.seconds(work)) for work in works if work.rows])
    for name in StepCosts.__slots__:
        assert getattr(fitted.costs, name) == pytest.approx(getattr(costs, name), rel=1e-6)
    assert (
        costs.seconds(StepWork(1, 0, 7, 0)) == costs.seconds(StepWork(1, 0, 0, 0)) < costs.seconds(StepWork(1, 0, 8, 0))
    )


def test_no_fitted_number_is_negative() -> None:
    works = [StepWork(n, n * 100, 0, 0) for n in range(1, 9)]
    fitted = fit([(work, max(0.001, 0.01 * work.decodes - 0.02)) for work in works])
    assert min(getattr(fitted.costs, name) for name in StepCosts.__slots__) >= 0


def test_a_cost_model_comes_back_from_its_file(tmp_path: Path) -> None:
    costs = CostModel(StepCosts(0.1), StepCosts(0.2, 0.3), source="a test")
    costs.write(tmp_path / "costs.json")
    assert read_costs(tmp_path / "costs.json") == costs
    with pytest.raises(ConfigError):
        read_costs(tmp_path / "none.json")
