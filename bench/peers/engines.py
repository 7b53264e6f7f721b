"""Engines against each other, without servers: they take turns at the same jobs, round after round.

A round gives every engine every job; who begins changes from job to job, so that the machine's
drift hits all alike. A job is prompts to compute and steps to decode after them. Where prefill is
compared, a job runs at several step budgets, the engine's own default among them; the best counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bench.peers.contenders import (
    CONTENDERS,
    LLAMA_Q4_0,
    LLAMA_Q4_K,
    LLAMA_Q8_0,
    OURS_INT4,
    OURS_INT8,
    OURS_INT8_KV,
    TRANSFORMERS,
)
from bench.peers.job import Job, JobTimes
from bench.peers.process import PeerError


@dataclass(frozen=True, slots=True)
class Workload:
    """So many seqs with so long prompts."""

    num_seqs: int
    prompt_tokens: int
    decode_steps: int
    compares_prefill: bool = False
    left_out: frozenset[str] = frozenset()
    """Engines that it would keep busy for too long."""

    @property
    def name(self) -> str:
        """As in the tables."""
        return f"{self.num_seqs} × {self.prompt_tokens}"

    @property
    def num_prompt_tokens(self) -> int:
        """Of all seqs."""
        return self.num_seqs * self.prompt_tokens


WORKLOADS = (
    Workload(1, 256, 48),
    Workload(16, 256, 32, compares_prefill=True),
    Workload(64, 256, 16, left_out=frozenset({TRANSFORMERS})),
    Workload(8, 2048, 24, compares_prefill=True),
)
"""Of the same bfloat16 weights."""
QUANTIZED_WORKLOADS = (
    Workload(1, 256, 48, left_out=frozenset({OURS_INT8_KV})),
    Workload(16, 256, 32, left_out=frozenset({OURS_INT8_KV})),
    Workload(8, 2048, 24, left_out=frozenset({OURS_INT8, OURS_INT4, LLAMA_Q8_0, LLAMA_Q4_0, LLAMA_Q4_K})),
)
"""Few tokens, where weights are what is read, and many, where it is KV."""
_WARM_UP = Job(num_seqs=4, prompt_tokens=192, decode_steps=4, budget_tokens=512, seed=0)


class JobEngine(Protocol):
    """What runs a job: an engine's process, or a fake."""

    @property
    def name(self) -> str:
        """One of `CONTENDERS`."""
        ...

    def run(self, job: Job) -> JobTimes:
        """Blocks. Raises PeerError."""
        ...


Lose = Callable[[JobEngine, PeerError], None]


@dataclass(slots=True)
class Measured:
    """One engine at one workload, over all rounds."""

    step_s: list[float] = field(default_factory=list)
    prefill_s: dict[int | None, list[float]] = field(default_factory=dict)
    """By budget."""
    first_tokens: list[int] = field(default_factory=list)

    @property
    def best_budget(self) -> int | None:
        """The budget with the shortest median."""
        return min(self.prefill_s, key=lambda budget: statistics.median(self.prefill_s[budget]))


Results = dict[str, dict[str, Measured]]
"""By workload, then by engine."""


def warm_up(engine: JobEngine) -> None:
    """One small job, not counted. Raises PeerError."""
    engine.run(_WARM_UP)


def run_round(
    engines: Sequence[JobEngine],
    workloads: Sequence[Workload],
    number: int,
    results: Results,
    lose: Lose,
) -> None:
    """Adds one round to `results`; an engine that fails is given to `lose`, which takes it out of `engines`."""
    for index, workload in enumerate(workloads):
        first = (number + index) % max(1, len(engines))
        for engine in (*engines[first:], *engines[:first]):
            if engine.name not in workload.left_out:
                measured = results.setdefault(workload.name, {}).setdefault(engine.name, Measured())
                try:
                    run_workload(engine, workload, number * len(workloads) + index, measured)
                except PeerError as error:
                    lose(engine, error)


def run_workload(engine: JobEngine, workload: Workload, seed: int, measured: Measured) -> None:
    """Adds to `measured`: all budgets where prefill is compared, else the largest; decodes once, after the last."""
    budgets = CONTENDERS[engine.name].budgets[0 if workload.compares_prefill else -1 :]
    for number, budget in enumerate(budgets):
        decode_steps = workload.decode_steps if number == len(budgets) - 1 else 0
        # A seed of its own for every job: a prefix cache must not know the prompts. The last is alike for all engines.
        job_seed = 1 + seed * 10 + len(budgets) - number
        times = engine.run(Job(workload.num_seqs, workload.prompt_tokens, decode_steps, budget, job_seed))
        measured.prefill_s.setdefault(budget, []).append(times.prefill_s)
        measured.step_s += times.step_s
    measured.first_tokens += times.first_tokens


def agreement(results: Results, ours: str, peer: str) -> float | None:
    """Share of the first greedy tokens that both engines chose alike; None if they share no workload."""
    pairs = [
        pair
        for engines in results.values()
        if ours in engines and peer in engines
        for pair in zip(engines[ours].first_tokens, engines[peer].first_tokens, strict=False)
    ]
    return sum(left == right for left, right in pairs) / len(pairs) if pairs else None
