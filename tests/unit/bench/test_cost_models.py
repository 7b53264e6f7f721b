"""The cost models that `tandem plan` takes by itself are those of the records."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from bench.cost_models import cost_models, sample_trace
from simulator.costs import StepCosts, StepWork, read_costs
from simulator.shipped import SAMPLE_TRACE, shipped_model, shipped_models

REMEDY = "run python -m bench.cost_models"


def test_what_is_shipped_is_what_the_records_give() -> None:
    made = dict(cost_models())
    assert sorted(made) == shipped_models(), REMEDY
    for name, model in made.items():
        shipped = read_costs(shipped_model(name))
        assert asdict(shipped.step) == pytest.approx(asdict(model.step), rel=1e-6), REMEDY
        assert {**shipped.document(), "step": None} == {**model.document(), "step": None}, REMEDY
    assert SAMPLE_TRACE.read_text() == sample_trace(), REMEDY


def test_the_gpus_costs_give_its_measured_steps() -> None:
    costs: StepCosts = read_costs(shipped_model("8b-h200")).step
    assert costs.seconds(StepWork(32, 32 * 1088, 0, 0)) == pytest.approx(6.3e-3, rel=0.03)
