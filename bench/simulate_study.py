"""Goodput per GPU against xPyD, for conversations and for agents, on assumed H100s: `python -m bench.simulate --study`.

Writes `bench/results/capacity.json` and, between its marks, the tables of `docs/capacity.md`. Cost models of GPUs are
made from the card's published limits, and say so; they are no measurements of Tandem.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, cast

from bench.markdown import table
from bench.page import ROOT
from bench.record import write_record
from simulator.cluster import Failures, Fleet, Policy, Setup, simulate
from simulator.costs import CostModel, StepCosts
from simulator.outcomes import Slo
from simulator.traces import Dialogue, LogNormal, conversation

PAGE = ROOT / "docs" / "capacity.md"
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
FLEETS = (
    Fleet(Policy.STATIC, 3, 1),
    Fleet(Policy.STATIC, 2, 2),
    Fleet(Policy.STATIC, 1, 3),
    Fleet(Policy.COLOCATED, 4),
    Fleet(Policy.AUTO, 4),
)
LOSSES = Failures(every_s=60.0, back_after_s=30.0)
RATES = {"conversation": 16.0, "agentic": 8.0}
"""Requests per second that are offered to each fleet."""
SPAN_S = 75.0
"""Of each trial: one worker is lost in it."""
Document = dict[str, Any]


def study(name: str, span_s: float = SPAN_S) -> Document:
    """Of one trace, by fleet: attainment and goodput per GPU, with sound workers and with losses."""
    found: Document = {}
    slo, rate = SLOS[name], RATES[name]
    trace = conversation(DIALOGUES[name], rate, round(rate * span_s), seed=0)
    for fleet in FLEETS:
        sound, losing = (simulate(Setup(fleet, H100, failures), trace).document(slo) for failures in (None, LOSSES))
        found[fleet.name] = {
            "per_gpu": rate * cast(float, sound["attainment"]) / (GPUS * fleet.num_workers),
            "sound": sound,
            "losing": losing,
        }
        print(f"{name}: {fleet.name}: {sound['attainment']:.3f} {losing['attainment']:.3f}", flush=True)
    return found


def section(results: Document) -> list[str]:
    """The tables."""
    lines: list[str] = []
    for name, fleets in results["traces"].items():
        rows = [
            [
                fleet,
                f"{found['per_gpu']:.3f}",
                f"{found['sound']['attainment']:.1%}",
                f"{found['losing']['attainment']:.1%}",
                f"{found['sound']['ttft_s']['p90']:.2f}",
                ", ".join(f"{role} {use['busy']:.0%}" for role, use in found["sound"]["use"].items()),
            ]
            for fleet, found in fleets.items()
        ]
        header = ["workers", "goodput per GPU", "attain", "one worker lost", "first token p90, s", "busy"]
        lines += [f"**{name}**, {RATES[name]:g} requests per second offered", "", table(header, rows)]
    return lines


def run() -> None:
    """Simulates, records, and writes the page's tables."""
    results = {
        "rates_per_s": RATES,
        "span_s": SPAN_S,
        "costs": H100.document(),
        "slo": {name: asdict(slo) for name, slo in SLOS.items()},
        "losses": asdict(LOSSES),
        "traces": {name: study(name) for name in DIALOGUES},
    }
    write_record("capacity", results)
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text("\n".join([before + BEGIN, "", *section(results)]) + END + after, encoding="utf-8")
