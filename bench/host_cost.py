"""What the host's time to launch steps with prompts costs one elastic worker, simulated: `python -m bench.host_cost`.

The real placement, core and `worker.budget.ChunkBudget` run closed loops on a simulated clock, with an 8B model's steps
on an H200: a decode step of 5.9 ms, which hides as much of the prompts' 23.5 µs per token, and steps with prompts that
take 0 to 20 ms at least; 14.4 ms where their kernels are launched one by one. Writes `bench/results/host-cost.json`;
exits 1 if tokens per second fall off a cliff.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from bench.support.machine import write_record
from bench.support.markdown import table
from bench.workload import GPU_LOADS, LoadOptions
from simulator.cluster import Fleet, Policy, Setup, simulate
from simulator.costs import CostModel, StepCosts, read_costs
from simulator.outcomes import Result, percentiles
from simulator.shipped import shipped_model
from simulator.traces import Ask, Piece

LAUNCH_MS = (0, 2, 4, 6, 8, 10, 12, 14.4, 16, 18, 20)
_DECODE_S, _PROMPT_TOKEN_S = 5.9e-3, 23.5e-6
_BEGIN_WITHIN_S = 2.0
"""Seconds over which callers begin, about as long as a request: later prompts come one by one, among decodes."""
_NOISE = 0.01
"""Share of the tokens per second by which equal deployments differ."""


def run(load: LoadOptions, launch_ms: float) -> dict[str, float]:
    """Returns tokens per second, and the median and last percentile of the requests' own p95 gaps, ms."""
    callers = load.concurrency or 1
    trace = [
        Ask(_BEGIN_WITHIN_S * min(each / callers, 1.0), (Piece(1 + each, load.prompt_tokens),), load.output_tokens)
        for each in range(load.num_requests)
    ]
    result: Result = simulate(Setup(Fleet(Policy.AUTO, 1), _costs(launch_ms), max_active=callers), trace)
    gaps = percentiles([each.itl_s for each in result.outcomes if each.itl_s is not None])
    rate = load.num_requests * load.output_tokens / result.span_s
    return {"tokens_per_s": rate, "gap_ms": 1e3 * gaps["p50"], "last_gap_ms": 1e3 * gaps["p99"]}


def _costs(launch_ms: float) -> CostModel:
    shipped = read_costs(shipped_model("8b-h200"))
    step = StepCosts(
        _DECODE_S,
        per_context_token=shipped.step.per_context_token,
        per_prompt_token=_PROMPT_TOKEN_S,
        hidden=_DECODE_S,
        launch=launch_ms / 1e3,
    )
    return replace(shipped, step=step)


def cliffs(launch_ms: Sequence[float], rates: Sequence[float]) -> list[float]:
    """Returns the costs from which on tokens per second fall by more than the longest decode or launch grows."""
    steps_ms = [max(each, 1e3 * _DECODE_S) for each in launch_ms]
    falls = zip(launch_ms[1:], pairwise(steps_ms), pairwise(rates), strict=True)
    return [at for at, (short, long), (before, after) in falls if after / before < short / long - _NOISE]


def as_markdown(results: Mapping[str, Any]) -> str:
    """Returns a row for each fixed cost, a cell for each load."""
    loads = results["loads"]
    rows = [
        (
            f"{launch_ms:g}",
            *(f"{cell['tokens_per_s']:,.0f} · {cell['gap_ms']:.1f}, {cell['last_gap_ms']:.1f}" for cell in cells),
        )
        for launch_ms, *cells in zip(results["launch_ms"], *loads.values(), strict=True)
    ]
    text = (
        "One elastic worker with an 8B model's steps on an H200, by the least time of a step with prompts: tokens/s · "
        "p95 gap of a request, median and 99th percentile, ms. Simulated, not measured: `python -m bench.host_cost`.\n"
    )
    return f"{text}\n{table(('a step with prompts takes at least, ms', *loads), rows)}"


def main() -> int:
    """Simulates every load at every cost."""
    loads = {load.name: [run(load, launch_ms) for launch_ms in LAUNCH_MS] for load in GPU_LOADS}
    results = {"launch_ms": LAUNCH_MS, "loads": loads}
    write_record("host-cost", results)
    print(as_markdown(results))
    found = {name: cliffs(LAUNCH_MS, [cell["tokens_per_s"] for cell in cells]) for name, cells in loads.items()}
    print("cliffs at, ms:", {name: at for name, at in found.items() if at} or "none")
    return 1 if any(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
