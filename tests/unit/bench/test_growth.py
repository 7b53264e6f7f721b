"""Steps are timed at the size asked for, and their growth is drawn and shown."""

from __future__ import annotations

import torch

from bench.growth import draw
from bench.page import render
from bench.support.step_timer import StepTimer
from bench.support.tiny_models import TINY_MODELS, save_tiny_model
from kernels.dispatch import AUTO, select_kernels
from models.loading import load_model

RESULTS = {
    "kernels": "reference",
    "threads": 2,
    "by_batch": [(1, 2.0), (2, 3.0)],
    "by_context": {"1": [(256, 2.0), (512, 2.5)], "8": [(256, 3.0)]},
    "by_block_size": [(1, 4.0), (16, 3.0)],
    "prompt_tokens_per_s": [(64, 900.0), (128, 1000.0)],
    "short_tokens": 256,
    "long_tokens": 2048,
    "seqs": 8,
    "chunk_tokens": 512,
}


def test_any_step_can_be_timed(tmp_path):
    cpu = torch.device("cpu")
    folder = save_tiny_model(TINY_MODELS[0], tmp_path)
    kernels = select_kernels(AUTO, cpu, torch.float32)
    timer = StepTimer(load_model(folder, "float32", cpu, kernels), 16, 256, kernels)
    for timing in (timer.decode(3, 40, 2), timer.prefill(2, 33, 31, 2)):
        assert 0 < timing.best_s <= timing.median_s
    timer.close()


def test_growth_is_drawn_with_a_panel_for_each_size(tmp_path):
    draw(RESULTS, tmp_path / "growth.svg")
    picture = (tmp_path / "growth.svg").read_text()
    assert picture.startswith("<?xml")
    assert picture.count('<g id="axes_') == 4


def test_a_result_that_is_not_there_has_no_section():
    record = {"date": "2026-11-21", "machine": {"cores": "2"}, "results": RESULTS}
    always = render({}).count("## ")
    page = render({"growth": record, "unknown": record})
    assert page.count("## ") == always + 1
    assert "images/growth.svg" in page
    assert "Taken 2026-11-21 on cores 2." in page
