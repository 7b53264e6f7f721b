"""Tables of docs/performance.md from the records of a GPU: `gpu` of `make gpu`, `gpu-vllm` of a comparison before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bench.support.markdown import MISSING, number, table

_HEADER = ("figure", "Tandem", "vLLM", "times vLLM")
_TIMES = {
    f"{key}_{which}": f"{what} {which}"
    for key, what in (("ttft", "first token"), ("itl", "gap"))
    for which in ("p50", "p99")
}

Document = Mapping[str, Any]
Row = tuple[str, ...]


def gpu_table(results: Document, kernels: Document) -> str:
    """Returns what `make gpu` found, beside vLLM where it ran; `kernels` is the record of `bench.kernels`."""
    rows: list[Row] = []
    found = {part["name"]: part["result"] for part in results["parts"] if part["result"]}
    theirs = {_lengths(each): _flat(each) for each in found.get("vllm", {}).get("loads", ())}
    served = found.get("served", {})
    for server, loads in served.get("servers", {}).items():
        for ours in loads:
            head = f"{served['model']}: served {_lengths(ours)}, {server}"
            rows += (*_load(head, _flat(ours), theirs.get(_lengths(ours))), *_steps(head, ours.get("steps", {})))
    if step := served.get("mixed_step"):
        head = f"mixed step of {step['decodes']} decodes and {step['chunk']} prompt tokens, launched one by one"
        rows.append((f"{head}: host, whole, ms", ", ".join(number(1e3 * step[key]) for key in ("launch_s", "wall_s"))))
        rows += [(f"{head}: idle share of the device", f"{step['idle_share']:.1%}")] if step["idle_share"] else []
    for part in results["parts"]:
        for each in part["result"]["results"] if part["name"] == "transfer" and part["result"] else ():
            what = f"hand-off, {each['transport']}, blocks of {each['block_bytes'] / 1024:.0f} KiB, GB/s"
            rows.append((what, number(each["median_gb_per_s"])))
    rows += [(f"idle share of the device, {gap['how']}", f"{gap['idle_share']:.1%}") for gap in kernels["launch_gaps"]]
    width = max(map(len, rows))
    return table(_HEADER[:width], [(*row, *(MISSING,) * (width - len(row))) for row in rows])


def beside_vllm_table(record: Document) -> str:
    """Returns a row for each load and figure of a deployment that vLLM has, too."""
    rows: list[Row] = []
    for deployment in ("one worker", "one prefill and one decode worker"):
        for load, ours in record[f"tandem {deployment}"].items():
            rows += _load(f"{load.replace('x', '×')}, {deployment}", ours, record["vllm"][load])
    return table(_HEADER, rows)


def _lengths(figures: Document) -> str:
    load = figures["options"]
    return f"{load['concurrency']} × ({load['prompt_tokens']} + {load['output_tokens']})"


def _flat(figures: Document) -> dict[str, float]:
    """Returns tokens per second, and latencies in ms, of what `tandem bench` told."""
    latencies = {key: 1e3 * figures["latencies_s"][key[:-4]][key[-3:]] for key in _TIMES}
    return {"tok_s": figures["rates_per_s"]["output_tokens"], **latencies}


def _load(head: str, ours: Document, theirs: Document | None) -> Iterator[Row]:
    for key, what in {"tok_s": ", tokens/s", **{key: f": {what}, ms" for key, what in _TIMES.items()}}.items():
        if theirs is None:
            yield (head + what, number(ours[key]))
        else:
            ratio = ours[key] / theirs[key] if key == "tok_s" else theirs[key] / ours[key]
            yield (head + what, number(ours[key]), number(theirs[key]), f"{ratio:.2f}")


def _steps(head: str, steps: Document) -> Iterator[Row]:
    """Returns what the workers' counters say of the load's steps."""
    if "mixed" in steps:
        yield (f"{head}: mean mixed step, ms", number(steps["mixed"]["mean_ms"]))
    if steps.get("graphs"):
        num_steps = sum(each["steps"] for kind, each in steps.items() if kind != "graphs")
        yield (
            f"{head}: CUDA graphs, steps of {num_steps:,.0f}",
            "; ".join(f"{k} {v:,.0f}" for k, v in steps["graphs"].items()),
        )
