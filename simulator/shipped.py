"""What comes with Tandem for `tandem plan`: a cost model of each class of machine that was measured, and a trace.

`bench.cost_models` writes both from `bench/results/`. A model is called SHAPE-CLASS, after the size of the measured
language model and the tier of the CPU or the name of the GPU.
"""

from __future__ import annotations

from pathlib import Path

import torch

from kernels.cpu.tiers import machine_tiers

MACHINES = Path(__file__).parent / "machines"
SAMPLE_TRACE = Path(__file__).parent / "chats.jsonl"
_GPU = "8b-h200"
_CPU_SHAPE = "135m"
"""The size that every class of CPU was measured with."""
_LEAST_TIER = "avx2"


def shipped_models() -> list[str]:
    """Returns the names of all cost models."""
    return sorted(file.stem for file in MACHINES.glob("*.json"))


def shipped_model(name: str) -> Path:
    """Returns where the cost model of that name lies, if there is one."""
    return MACHINES / f"{name}.json"


def model_file(name: str) -> Path:
    """Returns the file of a shipped model, else the file of that path."""
    return shipped if (shipped := shipped_model(name)).is_file() else Path(name)


def model_of_this_machine() -> str:
    """Returns the name of the nearest class: the GPU's where there is one, else the CPU's highest tier with a model."""
    if torch.cuda.is_available():
        return _GPU
    known = [f"{_CPU_SHAPE}-{tier}" for tier in (_LEAST_TIER, *machine_tiers())]
    return [name for name in known if shipped_model(name).is_file()][-1]
