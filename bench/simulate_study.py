"""Goodput per GPU against xPyD, for conversations and for agents, on assumed H100s: `python -m bench.simulate --study`.

Writes `bench/results/capacity.json` and, between its marks, the tables of `docs/operations.md`. Cost models of GPUs are
made from the card's published limits, and say so; they are no measurements of Tandem.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, cast

from bench.page import ROOT
from bench.record import write_record
from bench.support.markdown import table
from simulator.cluster import Failures, Fleet, Policy, Setup, simulate
from simulator.costs import CostModel, StepCosts
from simulator.outcomes import Slo
from simulator.sizing import highest_rate
from simulator.traces import Dialogue, LogNormal, Trace, conversation
from simulator.worker import ElasticOptions

PAGE = ROOT / "docs" / "operations.md"
BEGIN, END = "<!-- study -->", "<!-- end of the study -->"

CHAT_ALONE = (LogNormal(300, 0.8, 16, 2048), LogNormal(60, 0.6, 8, 256))
"""Prompts and outputs of single requests."""
DIALOGUES: Mapping[str, Dialogue] = {
    "conversation": Dialogue(
        256, LogNormal(4, 0.5, 1, 12), LogNormal(400, 1.0, 16, 8000), LogNormal(100, 0.6, 16, 400), pause_s=10.0
    ),
    "agentic": Dialogue(
        3000, LogNormal(6, 0.4, 2, 16), LogNormal(1200, 1.0, 64, 12000), LogNormal(60, 0.8, 8, 300), pause_s=2.0
    ),
}
SLOS = {"conversation": Slo(ttft_s=2.0, itl_s=0.08), "agentic": Slo(ttft_s=2.0, itl_s=0.08)}

GPUS = 8
"""Of a worker: tensor parallel in one node."""
_BYTES_PER_S = GPUS * 3.35e12
_FLOPS_PER_S = GPUS * 1979e12
_PARAMETERS = 405e9
_LAYERS, _KV_HEADS, _HEADS, _HEAD_DIM = 126, 8, 128, 128
_MEMORY_EFFICIENCY, _COMPUTE_EFFICIENCY = 0.6, 0.4
_KV_BYTES_PER_TOKEN = 2 * _LAYERS * _KV_HEADS * _HEAD_DIM * 2
_COMPUTE_S = 2 * _PARAMETERS / (_FLOPS_PER_S * _COMPUTE_EFFICIENCY)
"""Of a token."""
H100 = CostModel(
    StepCosts(
        base=_PARAMETERS / (_BYTES_PER_S * _MEMORY_EFFICIENCY) + 0.002,
        per_seq=_COMPUTE_S,
        per_context_token=_KV_BYTES_PER_TOKEN / (_BYTES_PER_S * _MEMORY_EFFICIENCY),
        per_prompt_token=_COMPUTE_S,
        per_prompt_context=4 * _LAYERS * _HEADS * _HEAD_DIM / (_FLOPS_PER_S / 2 * _COMPUTE_EFFICIENCY),
    ),
    block_size=64,
    pool_blocks=4000,
    max_seqs=128,
    chunk_tokens=2048,
    prefill_chunk_tokens=4096,
    kv_bytes_per_token=_KV_BYTES_PER_TOKEN,
    handoff_s=0.003,
    handoff_bytes_per_s=200e9,
    message_s=0.001,
    source="405B parameters in FP8 on nodes of 8 H100 SXM, from published limits and assumed efficiencies",
)
COLOCATED_H100 = replace(H100, chunk_tokens=256)
"""Chunks that keep the objective beside decodes, as an operator would choose; elastic workers size their own."""
ELASTIC = {name: ElasticOptions(slo.itl_s, waiting_served_ratio=20.0) for name, slo in SLOS.items()}
"""The objective, and first tokens that may wait: with the default ratio of 3 the chunks of a line become whole."""
FLEETS = (
    Fleet(Policy.STATIC, 3, 1),
    Fleet(Policy.STATIC, 2, 2),
    Fleet(Policy.STATIC, 1, 3),
    Fleet(Policy.COLOCATED, 4),
    Fleet(Policy.AUTO, 4),
)
LOSSES = Failures(every_s=60.0, back_after_s=30.0)
FIRST_RATES = {"conversation": 6.0, "agentic": 1.5}
"""Requests per second at which the search begins."""
RATIO = 1.15
"""Of neighbouring rates."""
SPAN_S = 75.0
"""Of each trial: one worker is lost in it."""
_LEAST_REQUESTS = 20
Document = dict[str, Any]


def study(name: str, span_s: float = SPAN_S) -> Document:
    """Of one trace, by fleet that passes at any rate: goodput per GPU, and what losses take of it at the same rate."""
    found = {fleet.name: _study(name, fleet, span_s) for fleet in FLEETS}
    return {fleet: each for fleet, each in found.items() if each is not None}


def _study(name: str, fleet: Fleet, span_s: float) -> Document | None:
    slo = SLOS[name]
    costs = COLOCATED_H100 if fleet.policy is Policy.COLOCATED else H100
    setup = Setup(fleet, costs, elastic=ELASTIC[name])

    def make(rate_per_s: float) -> Trace:
        return conversation(DIALOGUES[name], rate_per_s, max(_LEAST_REQUESTS, round(rate_per_s * span_s)), seed=0)

    rate = highest_rate(setup, make, slo, FIRST_RATES[name], RATIO)
    if rate == 0:
        return None
    trace = make(rate)
    sound, losing = (simulate(replace(setup, failures=each), trace).document(slo) for each in (None, LOSSES))
    print(f"{name}: {fleet.name}: {rate:.2f}/s, {losing['attainment']:.3f} with a loss", file=sys.stderr, flush=True)
    per_gpu = cast(float, sound["goodput_per_s"]) / (GPUS * fleet.num_workers)
    return {"rate_per_s": rate, "per_gpu": per_gpu, "sound": sound, "losing": losing}


def section(results: Document) -> list[str]:
    """The tables."""
    lines: list[str] = []
    for name, fleets in results["traces"].items():
        rows = [
            [
                fleet,
                f"{found['per_gpu']:.3f}",
                f"{found['rate_per_s']:.1f}",
                f"{found['sound']['attainment']:.1%}",
                f"{found['losing']['attainment']:.1%}",
                f"{found['sound']['ttft_s']['p90']:.2f}",
                ", ".join(f"{role} {use['busy']:.0%}" for role, use in found["sound"]["use"].items()),
            ]
            for fleet, found in fleets.items()
        ]
        header = ["workers", "goodput per GPU", "rate /s", "attain", "one worker lost", "first token p90, s", "busy"]
        lines += [
            f"**{name}**, at the highest rate with 90 % (neighbouring rates differ by 15 %)",
            "",
            table(header, rows),
        ]
    return lines


def run() -> None:
    """Simulates, records, and writes the page's tables."""
    results = {
        "first_rates_per_s": FIRST_RATES,
        "span_s": SPAN_S,
        "costs": H100.document(),
        "slo": {name: asdict(slo) for name, slo in SLOS.items()},
        "elastic": {name: asdict(each) for name, each in ELASTIC.items()},
        "losses": asdict(LOSSES),
        "traces": {name: study(name) for name in DIALOGUES},
    }
    write_record("capacity", results)
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text("\n".join([before + BEGIN, "", *section(results)]) + END + after, encoding="utf-8")
