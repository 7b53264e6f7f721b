"""Figures of `bench.peers` as a record. Pure.

A figure is a median over all rounds and, beside it, the best: on a machine with neighbours the best is nearer to the
truth, the median nearer to what one gets.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.peers.contenders import CONTENDERS
from bench.peers.engines import Measured, Results, Workload
from bench.peers.servers import Served

Document = dict[str, Any]


def step_documents(workloads: Sequence[Workload], results: Results) -> list[Document]:
    """One per workload: each engine's step in ms."""
    return [
        {
            "workload": workload.name,
            "step_ms": {name: _step_ms(each) for name, each in results.get(workload.name, {}).items() if each.step_s},
        }
        for workload in workloads
    ]


def prefill_documents(workloads: Sequence[Workload], results: Results) -> list[Document]:
    """One per workload that compares prefill: tokens/s of each engine by step budget."""
    return [
        {
            "workload": each.name,
            "tokens_per_s": {
                name: _prefill(name, measured, each.num_prompt_tokens)
                for name, measured in results.get(each.name, {}).items()
            },
        }
        for each in workloads
        if each.compares_prefill
    ]


def served_documents(served: Mapping[str, Served]) -> Document:
    """By server."""
    return {
        name: {
            "tokens_per_s": {"median": statistics.median(each.tokens_per_s), "best": max(each.tokens_per_s)},
            "gap_ms_p50": _median_ms(each.gap_s),
            "alone_ttft_ms": {"median": _median_ms(each.alone_ttft_s), "best": min(each.alone_ttft_s) * 1e3},
            "alone_gap_ms_p50": _median_ms(each.alone_gap_s),
            "client_cpu_share": statistics.median(each.client_cpu_share),
        }
        for name, each in served.items()
    }


def _step_ms(measured: Measured) -> Document:
    return {
        "median": _median_ms(measured.step_s),
        "best": min(measured.step_s) * 1e3,
        "num_steps": len(measured.step_s),
    }


def _prefill(name: str, measured: Measured, num_tokens: int) -> Document:
    """`median` and `best` are those of the best budget."""
    by_budget = {
        budget: {"median": num_tokens / statistics.median(times), "best": num_tokens / min(times)}
        for budget, times in measured.prefill_s.items()
    }
    return {
        **by_budget[measured.best_budget],
        "best_budget": measured.best_budget,
        "default_budget": CONTENDERS[name].budgets[0],
        "by_budget": {str(budget or "all at once"): figures for budget, figures in by_budget.items()},
    }


def _median_ms(values_s: Sequence[float]) -> float:
    return statistics.median(values_s) * 1e3
