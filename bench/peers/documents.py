"""Figures of `bench.peers` as a record. Pure.

A figure is a median over all rounds and, beside it, the best: on a machine with neighbours the best is nearer to the
truth, the median nearer to what one gets.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.ceilings import Ceilings
from bench.peers.contenders import CONTENDERS, OURS
from bench.peers.engines import Measured, Results, Workload
from bench.peers.servers import Served
from bench.roofline import Cost, step_cost
from models.config import ModelConfig

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Roof:
    """The ceilings, measured before each round, and the model whose work is held against them."""

    ceilings: Sequence[Ceilings]
    config: ModelConfig
    dtype: torch.dtype

    def of_step(self, workload: Workload, took_s: float | None) -> Document:
        """A decode step, halfway through those that were timed."""
        context = workload.prompt_tokens + workload.decode_steps // 2
        return self._document(step_cost(self.config, [(1, context)] * workload.num_seqs, self.dtype), took_s)

    def of_prefill(self, workload: Workload, took_s: float | None) -> Document:
        """All prompts of the workload in one step, as if no chunk budget read weights again."""
        lens = [(workload.prompt_tokens, workload.prompt_tokens)] * workload.num_seqs
        return self._document(step_cost(self.config, lens, self.dtype), took_s)

    def _document(self, cost: Cost, took_s: float | None) -> Document:
        """`share`: of the limit, what was reached."""
        limits_s = [cost.limit_s(each) for each in self.ceilings]
        return {
            "bytes": cost.num_bytes,
            "flops": cost.flops,
            "limit_ms": {"median": _median_ms(limits_s), "best": min(limits_s) * 1e3},
            "bound": "memory" if cost.is_memory_bound(self.ceilings[0]) else "compute",
            "share": None if took_s is None else statistics.median(limits_s) / took_s,
        }


def decode_documents(workloads: Sequence[Workload], results: Results, roof: Roof) -> list[Document]:
    """Those of `step_documents`, each with the roofline of Tandem's step."""
    documents = step_documents(workloads, results)
    for workload, document in zip(workloads, documents, strict=True):
        ours = document["step_ms"].get(OURS)
        document["roofline"] = roof.of_step(workload, None if ours is None else ours["median"] / 1e3)
    return documents


def step_documents(workloads: Sequence[Workload], results: Results) -> list[Document]:
    """One per workload: each engine's step in ms."""
    return [
        {
            "workload": workload.name,
            "step_ms": {name: _step_ms(each) for name, each in results.get(workload.name, {}).items() if each.step_s},
        }
        for workload in workloads
    ]


def prefill_documents(workloads: Sequence[Workload], results: Results, roof: Roof) -> list[Document]:
    """One per workload that compares prefill: tokens/s of each engine by step budget, and the roofline of Tandem's."""
    documents = []
    for workload in workloads:
        if workload.compares_prefill:
            measured = results.get(workload.name, {})
            engines = {name: _prefill(name, each, workload.num_prompt_tokens) for name, each in measured.items()}
            took_s = workload.num_prompt_tokens / engines[OURS]["median"] if OURS in engines else None
            roofline = roof.of_prefill(workload, took_s)
            documents.append({"workload": workload.name, "tokens_per_s": engines, "roofline": roofline})
    return documents


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
