"""Figures of `bench.peers` as a record, and the bars that they are held against. Pure.

A figure is a median over all rounds and, beside it, the best: on a machine with neighbours the best
is nearer to the truth, the median nearer to what one gets. A bar is met or missed by medians.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from bench.ceilings import Ceilings
from bench.interference import Interference
from bench.peers.busy import BusyResults
from bench.peers.contenders import (
    CONTENDERS,
    LLAMA,
    LLAMA_Q4_0,
    LLAMA_Q4_K,
    LLAMA_Q8_0,
    OURS,
    OURS_INT4,
    OURS_INT8,
    OURS_INT8_KV,
    VLLM,
)
from bench.peers.engines import Measured, Results, Workload
from bench.peers.served import COLOCATED, DISAGGREGATED, VLLM_SERVER, Served
from bench.roofline import Cost, decode_step_cost, prefill_cost
from models.config import ModelConfig

DECODE_BAR = 0.6
LLAMA_BAR, LLAMA_ALONE_BAR = 1.0, 1.1
ROOFLINE_BAR, ROOFLINE_ALONE_BAR = 1.7, 1.5
"""The second of each pair: of one seq."""
BUSY_BAR = 2.5
PREFILL_BAR = 1.25
INT8_BAR, INT4_BAR, INT8_KV_BAR = 1.6, 2.3, 1.4
SERVED_BAR = 1.6
INTERFERENCE_BAR = 2.0
TTFT_BAR = 1.0

_POSSESSIVE = {VLLM: "vLLM's", LLAMA: "llama.cpp's"}

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
    """Those of `step_documents`, each with the roofline of Tandem's step."""
    documents = step_documents(workloads, results)
    for workload, document in zip(workloads, documents, strict=True):
        ours = document["step_ms"].get(OURS)
        took_s = None if ours is None else ours["median"] / 1e3
        document["roofline"] = roof.document(workload, roof.decode(workload), took_s)
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


def busy_documents(results: BusyResults) -> list[Document]:
    """One per workload: our own step in ms, `quiet` and `busy`."""
    return [
        {"workload": name, "step_ms": {state: _step_ms(each) for state, each in states.items()}}
        for name, states in results.items()
    ]


def prefill_documents(workloads: Sequence[Workload], results: Results, roof: Roof) -> list[Document]:
    """One per workload that compares prefill: tokens/s of each engine by step budget, and the roofline of Tandem's."""
    documents = []
    for workload in workloads:
        if workload.compares_prefill:
            measured = results.get(workload.name, {})
            engines = {name: _prefill(name, each, workload.num_prompt_tokens) for name, each in measured.items()}
            took_s = workload.num_prompt_tokens / engines[OURS]["median"] if OURS in engines else None
            roofline = roof.document(workload, roof.prefill(workload), took_s)
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
    """The measured ceilings and the model whose work is held against them.

    Memory that others use too gives twice as much in one minute as in the next: each workload is held against what was
    measured right before and after its own turns.
    """

    ceilings: Mapping[str, Sequence[Ceilings]]
    """By workload."""
    config: ModelConfig
    dtype: torch.dtype

    def decode(self, workload: Workload) -> Cost:
        """One step, halfway through those that were timed."""
        context = workload.prompt_tokens + workload.decode_steps // 2
        return decode_step_cost(self.config, workload.num_seqs, context, self.dtype)

    def prefill(self, workload: Workload) -> Cost:
        """All prompts of the workload."""
        return prefill_cost(self.config, workload.num_seqs, workload.prompt_tokens, self.dtype)

    def document(self, workload: Workload, cost: Cost, took_s: float | None) -> Document:
        """`share`: of the limit, what was reached."""
        beside = self.ceilings[workload.name]
        limits_s = [cost.limit_s(each) for each in beside]
        memory_ms, compute_ms = (
            _median_ms([each(ceilings) for ceilings in beside]) for each in (cost.memory_s, cost.compute_s)
        )
        return {
            "bytes": cost.num_bytes,
            "flops": cost.flops,
            "intensity": cost.intensity,
            "memory_ms": memory_ms,
            "compute_ms": compute_ms,
            "limit_ms": {"median": _median_ms(limits_s), "best": min(limits_s) * 1e3},
            "bound": "memory" if memory_ms >= compute_ms else "compute",
            "share": None if took_s is None else statistics.median(limits_s) / took_s,
        }


@dataclass(frozen=True, slots=True)
class Documents:
    """What a run found, part by part; a part that was left out is empty."""

    decode: Sequence[Document] = ()
    prefill: Sequence[Document] = ()
    quantized: Sequence[Document] = ()
    busy: Sequence[Document] = ()
    served: Document = field(default_factory=dict)
    interference: Document = field(default_factory=dict)


def bars(found: Documents) -> list[Bar]:
    """All of them, in order."""
    return [
        *(_decode_bar(each, VLLM, DECODE_BAR) for each in found.decode),
        *(_roofline_bar(each, _of(each, ROOFLINE_ALONE_BAR, ROOFLINE_BAR)) for each in found.decode),
        *(_decode_bar(each, LLAMA, _of(each, LLAMA_ALONE_BAR, LLAMA_BAR)) for each in found.decode),
        *(_busy_bar(each) for each in found.busy),
        *(_prefill_bar(each) for each in found.prefill),
        *_quantized_bars(found.quantized),
        compare(
            "served tokens/s, colocated, times vLLM's",
            SERVED_BAR,
            found.served.get(COLOCATED, {}).get("tokens_per_s"),
            found.served.get(VLLM_SERVER, {}).get("tokens_per_s"),
            is_upper=False,
        ),
        _interference_bar(found.interference),
        compare(
            "long prompts' time to first token, times vLLM's",
            TTFT_BAR,
            found.interference.get(DISAGGREGATED, {}).get("ttft_ms"),
            found.interference.get(VLLM_SERVER, {}).get("ttft_ms"),
        ),
    ]


def _of(document: Document, alone: float, several: float) -> float:
    return alone if document["workload"].startswith("1 ") else several


def _decode_bar(document: Document, peer: str, limit: float) -> Bar:
    steps = document["step_ms"]
    return compare(
        f"decode step {document['workload']}, times {_POSSESSIVE[peer]}", limit, steps.get(OURS), steps.get(peer)
    )


def _roofline_bar(document: Document, limit: float) -> Bar:
    name = f"decode step {document['workload']}, times the roofline"
    return compare(name, limit, document["step_ms"].get(OURS), document["roofline"]["limit_ms"])


def _busy_bar(document: Document) -> Bar:
    steps = document["step_ms"]
    name = f"decode step {document['workload']} beside a busy process, times quiet"
    return compare(name, BUSY_BAR, steps.get("busy"), steps.get("quiet"))


def _quantized_bars(documents: Sequence[Document]) -> list[Bar]:
    """How many times as fast: our own forms against bfloat16, and against llama.cpp's."""
    if not documents:
        return []
    alone, long = documents[0], documents[-1]
    return [
        _speed_bar(alone, OURS_INT8, OURS, INT8_BAR),
        _speed_bar(alone, OURS_INT8, LLAMA_Q8_0, 1.0),
        _speed_bar(alone, OURS_INT4, OURS, INT4_BAR),
        _speed_bar(alone, OURS_INT4, LLAMA_Q4_0, 1.0),
        _speed_bar(alone, OURS_INT4, LLAMA_Q4_K, 1.0),
        _speed_bar(long, OURS_INT8_KV, OURS, INT8_KV_BAR),
    ]


def _speed_bar(document: Document, fast: str, slow: str, limit: float) -> Bar:
    steps = document["step_ms"]
    name = f"decode {document['workload']}, {fast}, times as fast as {slow}"
    return compare(name, limit, steps.get(slow), steps.get(fast), is_upper=False)


def _prefill_bar(document: Document) -> Bar:
    rates = document["tokens_per_s"]
    name = f"prefill {document['workload']}, times {_POSSESSIVE[VLLM]}"
    return compare(name, PREFILL_BAR, rates.get(OURS), rates.get(VLLM), is_upper=False)


def _interference_bar(burst: Document) -> Bar:
    ours = burst.get(DISAGGREGATED)
    ratio = None if ours is None else ours["p99_ratio"]
    return Bar("inter-token p99 in the burst, times the quiet p99", INTERFERENCE_BAR, True, ratio, ratio)


def compare(name: str, limit: float, ours: Document | None, theirs: Document | None, *, is_upper: bool = True) -> Bar:
    """Our `median` and `best` as multiples of theirs."""
    if not ours or not theirs:
        return Bar(name, limit, is_upper, None, None)
    return Bar(name, limit, is_upper, ours["median"] / theirs["median"], ours["best"] / theirs["best"])


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
