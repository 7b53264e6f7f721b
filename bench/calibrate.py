"""Fits the simulator's cost model to steps of an engine on this machine. Used by `bench.simulate`."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import torch

from bench.step_timer import StepTimer
from engine.loading import keep_freed_memory
from engine.step import Step
from kernels.dispatch import AUTO, select_kernels
from models.loading import load_model
from simulator.costs import CostModel, Fit, StepWork, fit

_SEQS = (1, 4, 16)
_CONTEXTS = (128, 1024)
_CHUNKS = (16, 64, 256, 512)
_BEFORE = (0, 1024)
_MIXED = ((1, 32), (4, 64), (8, 128), (8, 512))
"""(sequences that decode, prompt tokens beside them)"""
_CONTEXT_OF_MIXED = 300
_REPEATS = 3


def calibrate(model: Path, threads: int, block_size: int = 16, device: str = "cpu") -> tuple[CostModel, Fit]:
    """Times decode steps, chunks of prompts, and both together; takes about 15 s for 135M on two cores."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    target = torch.device(device)
    kernels = select_kernels(AUTO, target, torch.bfloat16)
    loaded = load_model(model, "bfloat16", target, kernels)
    timer = StepTimer(loaded, block_size, _SEQS[-1] * (_CONTEXTS[-1] + block_size), kernels)
    try:
        steps = [timer.step(seqs, context, 1) for seqs, context in product(_SEQS, _CONTEXTS)]
        steps += [timer.step(1, before, chunk) for chunk, before in product(_CHUNKS, _BEFORE)]
        for seqs, chunk in _MIXED:
            parts = timer.step(seqs, _CONTEXT_OF_MIXED, 1), timer.step(1, 0, chunk)
            steps.append(Step((*parts[0].seqs, *parts[1].seqs)))
        samples = [(StepWork.of(step.seqs), timer.median_s(step, _REPEATS)) for step in steps]
    finally:
        timer.close()
    fitted = fit(samples)
    layout = loaded.kv_layout(block_size)
    costs = CostModel(
        fitted.costs,
        block_size=block_size,
        kv_bytes_per_token=layout.block_bytes // block_size,
        source=f"measured here, {threads} thread(s) on {device}; steps differ by {fitted.median_error:.0%} (median)",
    )
    return costs, fitted
