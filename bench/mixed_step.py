"""One mixed step of an engine without a server: what the host takes to launch it, and how long the device idles."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from bench.kernels.launch_gaps import measure_gap
from bench.support.step_timer import StepTimer
from engine.loading import resolve_device
from engine.step import Step
from kernels.dispatch import AUTO, select_kernels
from models.loading import load_model

_DECODES, _CONTEXT, _CHUNK = 32, 1024, 256
_BLOCK_SIZE, _STEPS = 16, 20


@dataclass(frozen=True, slots=True)
class MixedStep:
    """Seconds per step, its kernels launched one by one."""

    decodes: int
    chunk: int
    launch_s: float
    wall_s: float
    idle_share: float | None
    """Share of the wall time in which the device computes nothing; None on a CPU."""


def measure_mixed(model: Path, device: str) -> MixedStep:
    """A chunk of a prompt beside decodes of the checkpoint in that folder."""
    target = resolve_device(device)
    kernels = select_kernels(AUTO, target, torch.bfloat16)
    with torch.inference_mode():
        loaded = load_model(model, "bfloat16", target, kernels)
        timer = StepTimer(loaded, _BLOCK_SIZE, _DECODES * (_CONTEXT + _BLOCK_SIZE), kernels)
        try:
            step = Step((*timer.step(_DECODES, _CONTEXT, 1).chunks, *timer.step(1, 0, _CHUNK).chunks))
            launch_s = timer.launch_s(step)
            if target.type != "cuda":
                return MixedStep(_DECODES, _CHUNK, launch_s, timer.median_s(step, 1), None)
            gap = measure_gap("mixed", lambda: timer.run(step), _STEPS)
            return MixedStep(_DECODES, _CHUNK, launch_s, gap.wall_s, gap.idle_share)
        finally:
            timer.close()
