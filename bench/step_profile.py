"""Where a step's time goes, kernel by kernel: `python -m bench.step_profile`.

Wraps every operation of a set of kernels in a clock and takes steps of the 135M shape with random
weights; writes `bench/results/profile.json`. What is in no kernel is sampling, batch building and Python.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from bench.peers.model import PEER_SHAPES, write_checkpoint
from bench.record import write_record
from bench.step_timer import StepTimer
from engine.loading import keep_freed_memory
from kernels.attention import AttentionBackend
from kernels.dispatch import AUTO, select_kernels
from kernels.operations import Kernels, LinearMap, Operations
from models.loading import load_model

STEPS = (("decode", 1, 256, 1), ("decode", 16, 256, 1), ("decode", 64, 256, 1), ("decode", 8, 2048, 1))
PROMPTS = (("prefill", 8, 0, 256), ("prefill", 1, 0, 2048))
"""(phase, seqs, context, tokens computed of each)."""
_REPEATS = 8
_LINEAR = ("linear", "gated_linear")


class Clock:
    """Seconds spent in each kernel since the last `take`."""

    def __init__(self) -> None:
        self._spent_s: dict[str, float] = defaultdict(float)

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, on this clock."""

        def run(*arguments: Any) -> Any:
            began_s = time.perf_counter()
            result = call(*arguments)
            self._spent_s[name] += time.perf_counter() - began_s
            return result

        return run

    def take(self) -> dict[str, float]:
        """What was spent, longest first; starts again at nothing."""
        spent = dict(sorted(self._spent_s.items(), key=lambda pair: -pair[1]))
        self._spent_s.clear()
        return spent


class _Timed:
    """Stands before a set's attention or operations."""

    def __init__(self, wrapped: Any, clock: Clock) -> None:
        self._wrapped = wrapped
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._wrapped, name)
        if name in _LINEAR:
            return lambda weight, bias: self._map(name, weight, found(weight, bias))
        return self._clock.timed(name, found) if callable(found) else found

    def _map(self, name: str, weight: torch.Tensor, packed: LinearMap) -> Callable[..., Any]:
        return self._clock.timed(f"{name} {weight.shape[0]}×{weight.shape[1]}", packed)


def measure(folder: Path, device: torch.device) -> dict[str, Any]:
    """Milliseconds of each kernel in each step, means."""
    kernels, clock = select_kernels(AUTO, device, torch.bfloat16), Clock()
    timed = Kernels(
        cast(AttentionBackend, _Timed(kernels.attention, clock)), cast(Operations, _Timed(kernels.operations, clock))
    )
    model = load_model(folder, "bfloat16", device, timed)
    timer = StepTimer(
        model,
        16,
        max(seqs * (context + query + 16) for _, seqs, context, query in (*STEPS, *PROMPTS)),
        kernels,
    )
    profiles = []
    for phase, seqs, context, query in (*STEPS, *PROMPTS):
        timer.prefill(seqs, context, query, 1)
        clock.take()
        began_s = time.perf_counter()
        timer.prefill(seqs, context, query, _REPEATS)
        runs = _REPEATS + 1  # the timer warms up once more
        total_ms = (time.perf_counter() - began_s) / runs * 1e3
        spent_ms = {name: seconds / runs * 1e3 for name, seconds in clock.take().items()}
        spent_ms["rest"] = total_ms - sum(spent_ms.values())
        profiles.append({"step": f"{phase} {seqs} × {context or query}", "total_ms": total_ms, "spent_ms": spent_ms})
        print(profiles[-1]["step"], f"{total_ms:.2f} ms:", ", ".join(f"{k} {v:.2f}" for k, v in spent_ms.items()))
    timer.close()
    return {"kernels": kernels.operations.name, "threads": torch.get_num_threads(), "profiles": profiles}


def main() -> int:
    """Measures and records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, help="compute threads; without it, as many as torch takes")
    parser.add_argument("--no-record", action="store_true")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(PEER_SHAPES["135m"], Path(folder))
        results = measure(Path(folder), torch.device("cpu"))
    if not arguments.no_record:
        write_record("profile", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
