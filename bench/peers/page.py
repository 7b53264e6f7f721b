"""The record of `bench.peers` in words and tables, for the terminal and for `docs/performance.md`. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.peers.contenders import OURS, PLAIN, QUANTIZED, VLLM
from bench.support.markdown import table

Document = Mapping[str, Any]
Reasons = Mapping[str, str]
"""Why an engine or a server was not measured, by its name."""
_MISSING = "–"
_WITH_DEFAULTS = (OURS, VLLM)
"""Engines that are shown at their default step budgets too."""
_STATES = ("quiet_ms", "burst_ms")


def section(results: Document) -> list[str]:
    """Parts of the page; `results` as `bench.peers` writes them."""
    settings = results["settings"]
    return [
        f"## Against the peers, the {settings['shape']} shape, tier {settings['tier']} "
        "(`make peers`, `python -m bench.peers --help`)\n",
        f"Random bfloat16 weights, {settings['threads']} threads for each engine on the same cores, greedy, "
        f"end-of-text ignored; engines take turns, rounds: {settings['rounds']}. Medians over all rounds, the best in "
        "brackets; the limit is the roofline of this machine, measured in the same run. `make peers-venv` installs "
        "the peers beside the repository.\n",
        *(f"{_facts(name, facts)}\n" for name, facts in results["engines"].items()),
        *(f"{name}: not measured: {reason}\n" for name, reason in results["not_measured"].items()),
        *(
            f"First greedy tokens that {name} and Tandem choose alike: {share:.0%}.\n"
            for name, share in results["first_tokens_equal"].items()
        ),
        "### The bars\n",
        bars_table(results["bars"]),
        *_without_default_budget(results),
        *_engines(results),
        *_quantized(results),
        *_busy(results),
        *served_section(results),
        *interference_section(results),
    ]


def _without_default_budget(results: Document) -> Iterator[str]:
    """Of quick records before they measured every step budget."""
    vllm = next((document["tokens_per_s"].get(VLLM) for document in results["prefill"]), None)
    if vllm is not None and str(vllm["default_budget"]) not in vllm["by_budget"]:
        yield (
            f"vLLM's prefill was measured at {vllm['best_budget']} tokens a step alone, not at its default of "
            f"{vllm['default_budget']}, at which it is up to a third faster in whole records: held against that, the "
            "bars of prefill may be missed.\n"
        )


def bars_table(bars: Sequence[Document]) -> str:
    """One line per bar."""
    return table(("", "bar", "by medians", "by best", ""), [_bar_row(bar) for bar in bars])


def _bar_row(bar: Document) -> tuple[str, ...]:
    verdict = {True: "met", False: "missed", None: "not measured"}[bar["met"]]
    sign = "≤" if bar["is_upper"] else "≥"
    return (bar["name"], f"{sign} {bar['limit']:g}", _number(bar["by_median"]), _number(bar["by_best"]), verdict)


def _engines(results: Document) -> list[str]:
    if not results["decode"]:
        return []
    names = [name for name in PLAIN if name in results["engines"] or name in results["not_measured"]]
    return [
        "### Decode step, ms\n",
        _decode_table(results["decode"], names, results["not_measured"]),
        "### Prefill, tokens/s\n",
        _prefill_table(results["prefill"], names, results["not_measured"]),
        "### Roofline of Tandem's phases\n",
        _ceilings(results["ceilings"]),
        _roofline_table(results),
    ]


def _decode_table(documents: Sequence[Document], names: Sequence[str], missing: Reasons) -> str:
    header = ("seqs × context", *names, "limit")
    rows = [(*_steps(each, names, missing), f"{_limit_ms(each['roofline']):.2f}") for each in documents]
    return table(header, rows)


def _steps(document: Document, names: Sequence[str], missing: Reasons) -> tuple[str, ...]:
    """Workload and step of each engine."""
    steps = document["step_ms"]
    return (document["workload"], *(_pair(steps.get(name), 2, _why(name, missing)) for name in names))


def _quantized(results: Document) -> list[str]:
    """Older records have none."""
    if not results.get("quantized"):
        return []
    rows = [_steps(each, QUANTIZED, results["not_measured"]) for each in results["quantized"]]
    facts = results["engines"]
    memory = ("memory, MB", *(facts.get(name, {}).get("resident_mb", _MISSING) for name in QUANTIZED))
    return [
        "### Decode step of quantised weights and KV, ms\n",
        "The first column is the bfloat16 checkpoint itself. Memory: what the engine's process holds once it has done "
        "a small job, with its libraries and without the KV of larger ones.\n",
        table(("seqs × context", *QUANTIZED), [*rows, memory]),
    ]


def _busy(results: Document) -> list[str]:
    """Older records have none."""
    if not results.get("busy"):
        return []
    rows = [
        (each["workload"], *(_pair(each["step_ms"][state], 2) for state in ("quiet", "busy")))
        for each in results["busy"]
    ]
    return [
        "### Tandem's decode step beside a busy process, ms\n",
        "A process that spins on every core at the engine's own priority.\n",
        table(("seqs × context", "quiet", "beside the busy process"), rows),
    ]


def _prefill_table(documents: Sequence[Document], names: Sequence[str], missing: Reasons) -> str:
    header = ("prompts × tokens", *names, "Tandem, vLLM at their default step budgets", "limit")
    rows = []
    for each in documents:
        rates = each["tokens_per_s"]
        num_tokens = _tokens_of(each["workload"])
        defaults = ", ".join(_default_rate(rates.get(name)) for name in _WITH_DEFAULTS)
        limit = num_tokens / _limit_ms(each["roofline"]) * 1e3
        cells = (_rate(rates.get(name), _why(name, missing)) for name in names)
        rows.append((each["workload"], *cells, defaults, f"{limit:,.0f}"))
    return table(header, rows)


def _roofline_table(results: Document) -> str:
    header = ("phase", "MB", "GFLOP", "flop/byte", "bound by", "limit, ms", "share of the limit")
    phases = [(f"decode {each['workload']}", each["roofline"]) for each in results["decode"]]
    phases += [(f"prefill {each['workload']}", each["roofline"]) for each in results["prefill"]]
    rows = [
        (
            name,
            f"{roof['bytes'] / 1e6:,.0f}",
            f"{roof['flops'] / 1e9:,.2f}",
            f"{roof['intensity']:.1f}",
            roof["bound"],
            f"{_limit_ms(roof):.2f}",
            _MISSING if roof["share"] is None else f"{roof['share']:.0%}",
        )
        for name, roof in phases
    ]
    return table(header, rows)


def served_section(results: Document) -> list[str]:
    """Nothing if it was not measured."""
    if not results["served"]:
        return []
    shape = results["settings"]["served"]
    rows = [
        (
            name,
            _pair(each["tokens_per_s"], 0),
            f"{each['gap_ms_p50']:.1f}",
            _pair(each["alone_ttft_ms"], 1),
            f"{each['alone_gap_ms_p50']:.1f}",
            f"{each['client_cpu_share']:.0%}",
        )
        for name, each in results["served"].items()
    ]
    work = f"{shape['streams']} × ({shape['prompt_tokens']} + {shape['output_tokens']})"
    header = (
        *("server", f"output tokens/s, {work}", "gap p50, ms"),
        *("alone: first token, ms", "alone: gap p50, ms", "client's share of a core"),
    )
    return ["### Served, on the same cores as the client\n", table(header, rows)]


def interference_section(results: Document) -> list[str]:
    """Nothing if it was not measured."""
    if not results["interference"]:
        return []
    shape = results["settings"]["burst"]
    rows = [
        (
            name,
            *(" / ".join(f"{each[state][rank]:.1f}" for rank in ("p50", "p99", "max")) for state in _STATES),
            f"{each['p99_ratio']:.2f}",
            _pair(each["ttft_ms"], 0),
        )
        for name, each in results["interference"].items()
    ]
    return [
        "### Interference (`python -m bench.interference`)\n",
        f"{shape['streams']} streams of {shape['prompt_tokens']} + {shape['output_tokens']} tokens; "
        f"{shape['burst_prompts']} prompts of {shape['burst_prompt_tokens']} tokens, {shape['burst_spacing_s']} s "
        "apart. Gaps between messages as p50 / p99 / max in ms.\n",
        table(("server", "quiet", "in the burst", "p99, times quiet", "long prompts' first token, ms"), rows),
    ]


def _ceilings(ceilings: Mapping[str, Any]) -> str:
    """Older records have one for the run: the highest of several."""
    is_old = "read_gb_s" in ceilings
    measured: list[Document] = [ceilings] if is_old else [each for beside in ceilings.values() for each in beside]
    when = (
        "The highest of this run" if is_old else "Before and after Tandem's turns, a median for each workload's limit"
    )
    return (
        f"{when}: {_span([each['read_gb_s'] for each in measured], 1)} GB/s read, "
        f"{_span([max(each['bf16_tflop_s'], each['f32_tflop_s']) for each in measured], 2)} TFLOP/s in products of "
        "bfloat16 or float32, whichever are faster. Bytes are weights and KV, each once.\n"
    )


def _span(values: Sequence[float], digits: int) -> str:
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low} to {high}"


def _facts(name: str, facts: Mapping[str, str]) -> str:
    return f"{name}: " + ", ".join(f"{key} {value}" for key, value in facts.items() if value)


def _why(name: str, missing: Reasons) -> str:
    return f"not measured: {missing[name]}" if name in missing else _MISSING


def _pair(figures: Document | None, digits: int, otherwise: str = _MISSING) -> str:
    if figures is None:
        return otherwise
    return f"{figures['median']:,.{digits}f} ({figures['best']:,.{digits}f})"


def _rate(figures: Document | None, otherwise: str) -> str:
    if figures is None:
        return otherwise
    budget = figures["best_budget"]
    return _pair(figures, 0) + (f" at {budget}" if budget else "")


def _default_rate(figures: Document | None) -> str:
    if figures is None:
        return _MISSING
    budget = figures["default_budget"]
    found = figures["by_budget"].get(str(budget))
    return _MISSING if found is None else f"{found['median']:,.0f} at {budget}"


def _limit_ms(roofline: Document) -> float:
    """Older records have no median of their own."""
    if "limit_ms" in roofline:
        return float(roofline["limit_ms"]["median"])
    return max(float(roofline["memory_ms"]), float(roofline["compute_ms"]))


def _tokens_of(workload: str) -> int:
    num_seqs, num_tokens = workload.split(" × ")
    return int(num_seqs) * int(num_tokens)


def _number(value: float | None) -> str:
    return _MISSING if value is None else f"{value:.2f}"
