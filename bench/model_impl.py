"""How fast is transformers' forward pass with our parts? `python -m bench.model_impl [--shape 135m] [--rounds 3]`.

Decode steps of one checkpoint with random weights, natively and by transformers, in turns in one process: the median of
each, and the share of native speed. `--record` writes `bench/results/model-impl-<shape>-<tier>.json`. `--profile`
prints instead in which functions the steps by transformers spend their time.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.record import write_record
from bench.support.checkpoints import PEER_SHAPES, write_checkpoint
from bench.support.machine import cpu_tier
from bench.support.step_timer import StepTimer
from engine.loading import keep_freed_memory
from kernels.dispatch import AUTO, select_kernels
from models.loading import load_model
from models.preflight import NATIVE, TRANSFORMERS

BATCHES = (1, 16)
CONTEXT_TOKENS = 256
_BLOCK_SIZE = 16
_REPEATS = 20


def open_timer(folder: Path, implementation: str) -> StepTimer:
    """Loads the checkpoint in bfloat16 for the CPU, with kernels of its own."""
    cpu = torch.device("cpu")
    kernels = select_kernels(AUTO, cpu, torch.bfloat16)
    if kernels.take_thread is not None:
        kernels.take_thread()
    model = load_model(folder, "bfloat16", cpu, kernels, implementation=implementation)
    return StepTimer(model, _BLOCK_SIZE, (CONTEXT_TOKENS + _BLOCK_SIZE) * max(BATCHES), kernels)


def print_profile(timer: StepTimer) -> None:
    """Of decode steps at batch 1, by the time in each function itself."""
    step, profiler = timer.step(1, CONTEXT_TOKENS, 1), cProfile.Profile()
    timer.run(step)
    with torch.inference_mode():
        profiler.runcall(lambda: [timer.run(step) for _ in range(_REPEATS)])
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def measure(timers: dict[str, StepTimer], rounds: int) -> list[dict[str, Any]]:
    """One document per batch size: the medians of both implementations, in turns."""
    found = []
    for batch in BATCHES:
        taken: dict[str, list[float]] = {name: [] for name in timers}
        for _ in range(rounds):
            for name, timer in timers.items():
                taken[name].append(timer.decode(batch, CONTEXT_TOKENS, _REPEATS).median_s)
        native_s, foreign_s = (statistics.median(taken[name]) for name in (NATIVE, TRANSFORMERS))
        found.append(
            {
                "step": f"{batch} × {CONTEXT_TOKENS}",
                "native_ms": native_s * 1e3,
                "transformers_ms": foreign_s * 1e3,
                "share": native_s / foreign_s,
            }
        )
    return found


def main() -> int:
    """Measures, prints, and records if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(PEER_SHAPES), default="135m")
    parser.add_argument("--rounds", type=int, default=3)
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--record", action="store_true")
    shown.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(PEER_SHAPES[arguments.shape], Path(folder))
        timers = {name: open_timer(Path(folder), name) for name in (NATIVE, TRANSFORMERS)}
    if arguments.profile:
        print_profile(timers[TRANSFORMERS])
        return 0
    steps = measure(timers, arguments.rounds)
    for each in steps:
        print(
            f"{arguments.shape} {each['step']}: native {each['native_ms']:.1f} ms, "
            f"by transformers {each['transformers_ms']:.1f} ms, {each['share']:.2f} of native speed"
        )
    if arguments.record:
        tier = cpu_tier()
        results = {"shape": arguments.shape, "tier": tier, "rounds": arguments.rounds, "steps": steps}
        write_record(f"model-impl-{arguments.shape}-{tier}", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
