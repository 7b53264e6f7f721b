"""Figures of `bench.peers` as a record, and the bars that they are held against. Pure.

A figure is a median over all rounds and, beside it, the best: on a machine with neighbours the best
is nearer to the truth, the median nearer to what one gets. A bar is met or missed by medians.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bench.ceilings import Ceilings
from bench.interference import DISAGGREGATED, Interference
from bench.peers.engines import BUDGETS, Measured, Results, Workload
from bench.peers.served import TANDEM_SERVERS, VLLM_SERVER, Served
from bench.roofline import Cost, decode_step_cost, prefill_cost
from models.config import ModelConfig

OURS = "tandem"
VLLM = "vllm"

DECODE_BAR = 0.6
PREFILL_BAR = 1.15
MEMORY_LIMIT_BAR = 1.4
SERVED_BAR = 1.3
INTERFERENCE_BAR = 2.0
TTFT_BAR = 1.0

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Bar:
    """What is asked and what was found; None where there was nothing to compare with."""

    name: str
    limit: float
    is_upper: bool
    """Whether the value may be at most `limit`; otherwise at least."""
    by_median: float | None
    by_best: float | None

    @property
    def met(self) -> bool | None:
        """None if not measured."""
        if self.by_median is None:
            return None
        return self.by_median <= self.limit if self.is_upper else self.by_median >= self.limit

    def document(self) -> Document:
        """For the record."""
        return {**asdict(self), "met": self.met}


def decode_documents(workloads: Sequence[Workload], results: Results, roof: Roof) -> list[Document]:
    """One per workload: each engine's step in ms, and the roofline of Tandem's."""
    documents = []
    for workload in workloads:
        engines = {name: _step_ms(each) for name, each in results.get(workload.name, {}).items() if each.step_s}
        cost = roof.decode(workload)
        took_s = engines[OURS]["median"] / 1e3 if OURS in engines else None
        documents.append({"workload": workload.name, "step_ms": engines, "roofline": roof.document(cost, took_s)})
    return documents


def prefill_documents(workloads: Sequence[Workload], results: Results, roof: Roof) -> list[Document]:
    """One per workload that compares prefill: tokens/s of each engine by step budget, and the roofline of Tandem's."""
    documents = []
    for workload in workloads:
        if workload.compares_prefill:
            measured = results.get(workload.name, {})
            engines = {name: _prefill(name, each, workload.num_prompt_tokens) for name, each in measured.items()}
            took_s = workload.num_prompt_tokens / engines[OURS]["median"] if OURS in engines else None
            roofline = roof.document(roof.prefill(workload), took_s)
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


def interference_documents(interference: Mapping[str, Interference]) -> Document:
    """By server."""
    return {name: each.document() for name, each in interference.items()}


@dataclass(frozen=True, slots=True)
class Roof:
    """The measured ceilings and the model whose work is held against them."""

    ceilings: Ceilings
    config: ModelConfig
    dtype: torch.dtype

    def decode(self, workload: Workload) -> Cost:
        """One step, halfway through those that were timed."""
        context = workload.prompt_tokens + workload.decode_steps // 2
        return decode_step_cost(self.config, workload.num_seqs, context, self.dtype)

    def prefill(self, workload: Workload) -> Cost:
        """All prompts of the workload."""
        return prefill_cost(self.config, workload.num_seqs, workload.prompt_tokens, self.dtype)

    def document(self, cost: Cost, took_s: float | None) -> Document:
        """`share`: of the limit, what was reached."""
        limit_s = cost.limit_s(self.ceilings)
        return {
            "bytes": cost.num_bytes,
            "flops": cost.flops,
            "intensity": cost.intensity,
            "memory_ms": cost.memory_s(self.ceilings) * 1e3,
            "compute_ms": cost.compute_s(self.ceilings) * 1e3,
            "bound": "memory" if cost.is_memory_bound(self.ceilings) else "compute",
            "share": None if took_s is None else limit_s / took_s,
        }


def bars(decode: Sequence[Document], prefill: Sequence[Document], served: Document, burst: Document) -> list[Bar]:
    """All of them, in order, from the documents above."""
    alone = decode[0]
    return [
        *(_decode_bar(each) for each in decode),
        _bar(
            f"decode step {alone['workload']}, times the memory limit",
            MEMORY_LIMIT_BAR,
            alone["step_ms"].get(OURS),
            {"median": alone["roofline"]["memory_ms"], "best": alone["roofline"]["memory_ms"]},
        ),
        *(_prefill_bar(each) for each in prefill),
        _bar(
            "served tokens/s, times vLLM's",
            SERVED_BAR,
            _best_of_ours(served),
            served.get(VLLM_SERVER, {}).get("tokens_per_s"),
            is_upper=False,
        ),
        _interference_bar(burst),
        _bar(
            "long prompts' time to first token, times vLLM's",
            TTFT_BAR,
            burst.get(DISAGGREGATED, {}).get("ttft_ms"),
            burst.get(VLLM_SERVER, {}).get("ttft_ms"),
        ),
    ]


def _decode_bar(document: Document) -> Bar:
    steps = document["step_ms"]
    return _bar(f"decode step {document['workload']}, times vLLM's", DECODE_BAR, steps.get(OURS), steps.get(VLLM))


def _prefill_bar(document: Document) -> Bar:
    rates = document["tokens_per_s"]
    name = f"prefill {document['workload']}, times vLLM's"
    return _bar(name, PREFILL_BAR, rates.get(OURS), rates.get(VLLM), is_upper=False)


def _interference_bar(burst: Document) -> Bar:
    ours = burst.get(DISAGGREGATED)
    ratio = None if ours is None else ours["p99_ratio"]
    return Bar("inter-token p99 in the burst, times the quiet p99", INTERFERENCE_BAR, True, ratio, ratio)


def _bar(name: str, limit: float, ours: Document | None, theirs: Document | None, *, is_upper: bool = True) -> Bar:
    if not ours or not theirs:
        return Bar(name, limit, is_upper, None, None)
    return Bar(name, limit, is_upper, ours["median"] / theirs["median"], ours["best"] / theirs["best"])


def _best_of_ours(served: Document) -> Document | None:
    ours = [served[name]["tokens_per_s"] for name in TANDEM_SERVERS if name in served]
    return max(ours, key=lambda rates: rates["median"], default=None)


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
        "default_budget": BUDGETS[name][0],
        "by_budget": {str(budget or "all at once"): figures for budget, figures in by_budget.items()},
    }


def _median_ms(values_s: Sequence[float]) -> float:
    return statistics.median(values_s) * 1e3
