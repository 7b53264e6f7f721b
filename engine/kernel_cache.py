"""Fills Triton's cache with all that a model launches on a GPU, on a machine without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.graph_shapes import GraphLadder
from engine.loading import layout_of, load
from engine.warm_up import StepSizes, warm_up
from kernels import triton
from kernels.triton.absent_gpu import compile_instead, pretend
from shell.config import WorkerConfig

_SIZES = StepSizes(chunk_tokens=512, max_seqs=68, context_tokens=1024)
"""Small, for a CPU multiplies here: which kernels there are depends on the model, once steps go beyond one split,
decodes as far as the largest tile of quantised products (65 to 256 tokens), and a step beyond it."""
_LADDER = GraphLadder.of(_SIZES.max_seqs, _SIZES.chunk_tokens, _SIZES.max_seqs, _SIZES.context_tokens)


@dataclass(frozen=True, slots=True)
class Filled:
    """How many kernels of an architecture were compiled, by types and options."""

    arch: int
    num_compiled: int
    num_found: int
    """Kernels that the cache had already."""


def fill_kernel_cache(config: WorkerConfig, archs: Sequence[int], cache: Path) -> list[Filled]:
    """Compiles for each of `archs` what a worker with these options compiles at start, into the folder `cache`.

    Loads the weights into host memory. This process can launch no Triton kernel afterwards.
    Raises ConfigError and CheckpointError.
    """
    cpu, kernels = torch.device("cpu"), triton.load()
    model = load(config, cpu, kernels)
    found, filled = compile_instead(cache), []
    for arch in archs:
        pretend(arch)
        found.clear()
        warm_up(model, kernels, layout_of(config, model), _SIZES, _LADDER)
        num_found = sum(count for (_, is_found), count in found.items() if is_found)
        filled.append(Filled(arch, found.total() - num_found, num_found))
    return filled
