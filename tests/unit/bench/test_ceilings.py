"""Ceilings are measured, positive, and leave the thread count as it was."""

import torch

from bench import ceilings
from bench.ceilings import measure_ceilings, measure_copy_gb_s, measure_read_gb_s
from bench.support.timing import time_s

CPU = torch.device("cpu")


def test_every_ceiling_is_measured_and_threads_are_put_back(monkeypatch):
    monkeypatch.setattr(ceilings, "_READ_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(ceilings, "_GEMM_SIZES", {"cpu": (64, 128)})
    before = torch.get_num_threads()
    found = measure_ceilings(CPU, threads=before + 1, budget_s=0.001)
    assert torch.get_num_threads() == before
    assert found.threads == before + 1
    assert min(found.read_gb_s, found.copy_gb_s, found.bf16_tflop_s, found.f32_tflop_s) > 0


def test_bandwidths_are_plausible():
    for measure in (measure_read_gb_s, measure_copy_gb_s):
        assert 0.05 < measure(CPU, 1 << 22, budget_s=0.01) < 100_000


def test_timed_calls_take_turns_and_the_mean_of_a_round_counts():
    seen = []
    took_s = time_s([lambda: seen.append("a"), lambda: seen.append("b")], CPU, budget_s=0.0)
    assert seen[:4] == ["a", "b", "a", "b"]
    assert 0 < took_s < 1


def test_half_precision_shares_one_ceiling():
    found = ceilings.Ceilings("cpu", 1, 1.0, 1.0, bf16_tflop_s=3.0, f32_tflop_s=2.0)
    assert [found.tflop_s(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32)] == [3.0, 3.0, 2.0]


def test_where_float32_is_faster_narrow_products_are_held_against_that():
    found = ceilings.Ceilings("cpu", 1, 1.0, 1.0, bf16_tflop_s=0.001, f32_tflop_s=2.0)
    assert found.tflop_s(torch.bfloat16) == 2.0
