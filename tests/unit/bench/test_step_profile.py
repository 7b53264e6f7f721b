"""A clock on the native step says what each kind of phase took, and changes nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.roofline import phase_bytes, step_costs
from bench.step_profile import spent_by_phase
from bench.support.checkpoints import PEER_SHAPES, write_checkpoint
from bench.support.step_timer import StepTimer
from kernels.cpu import library
from kernels.cpu.decoder import PHASE_KINDS, NativeStep, PhaseClock
from kernels.dispatch import select_kernels
from kernels.quantized import QuantForm
from models.config import load_model_config
from models.loading import load_model
from tandem.kv_layout import QuantDType

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smoke")
    write_checkpoint(PEER_SHAPES["smoke"], folder)
    return folder


def test_the_bytes_of_the_phases_are_those_of_the_roofline(checkpoint: Path) -> None:
    config, lens = load_model_config(checkpoint), [(1, 257)] * 3
    found = phase_bytes(config, lens, torch.bfloat16)
    costs = step_costs(config, lens, torch.bfloat16)
    assert set(found) <= set(PHASE_KINDS)
    assert found["lm_head"] == costs["lm_head"].num_bytes
    assert sum(found[each] for each in ("qkv", "output", "gate_up", "down")) == costs["linear"].num_bytes
    written = 2 * len(lens) * config.num_kv_heads * config.head_dim * config.num_layers * 2
    assert found["attend"] == costs["attention"].num_bytes - written


@pytest.mark.skipif(library.obstacle() is not None, reason="no native kernels here")
@pytest.mark.parametrize(("form", "least", "most"), [(None, 1.0, 1.2), (QuantForm.INT8, 0.5, 0.7)])
def test_the_weights_bytes_are_those_that_the_model_holds(
    checkpoint: Path, form: QuantForm | None, least: float, most: float
) -> None:
    model = load_model(checkpoint, "bfloat16", CPU, select_kernels("cpu", CPU, torch.bfloat16), form)
    step = model.decoder.compiled
    assert isinstance(step, NativeStep)
    plain = phase_bytes(load_model_config(checkpoint), [(1, 257)], torch.bfloat16)
    found = step.weight_bytes()
    assert set(plain) - set(found) == {"attend"}
    assert all(least <= found[kind] / plain[kind] <= most for kind in found)


@pytest.mark.skipif(library.obstacle() is not None, reason="no native kernels here")
@pytest.mark.parametrize("kv_dtype", [None, *QuantDType])
def test_every_kind_of_phase_of_a_step_is_on_the_clock(checkpoint: Path, kv_dtype: QuantDType | None) -> None:
    kernels = select_kernels("cpu", CPU, torch.bfloat16)
    model = load_model(checkpoint, "bfloat16", CPU, kernels)
    step = model.decoder.compiled
    assert isinstance(step, NativeStep)
    timer = StepTimer(model, 16, 256, kernels, kv_dtype)
    timer.decode(2, 16, repeats=1)  # on no clock
    step.clock = PhaseClock()
    timer.decode(2, 16, repeats=3)
    spent = spent_by_phase(step.clock, 4, {"down": 7})
    assert set(spent) == set(PHASE_KINDS) - {"keep_rows", "experts"}  # of a decode step all rows are kept
    assert all(each.work_ms > 0 and each.wait_ms >= 0 for each in spent.values())
    assert (spent["down"].num_bytes, spent["embed"].num_bytes) == (7, 0)
    assert spent_by_phase(step.clock, 1, {}) == {}
    timer.prefill(1, 0, 16, repeats=1)
    assert "keep_rows" in spent_by_phase(step.clock, 2, {})
    timer.close()
