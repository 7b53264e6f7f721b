"""The performance page's section on kernels, from `bench/results/kernels-<device>.json`. Pure."""

from __future__ import annotations

from typing import Any

from bench.support.markdown import table

Rows = list[dict[str, Any]]
"""As `bench.kernels.measurement` documents one measurement each."""


def section(results: dict[str, Any]) -> list[str]:
    """Ceilings, a table per kind of kernel, and on a GPU the parts of a step, launch gaps and aims."""
    ceilings, rows = results["ceilings"], results["measurements"]
    operations = [row for row in rows if row["kernel"] not in {"decode", "prefill"}]
    lines = [
        f"## Kernels on {results.get('gpu', 'the CPU')} (`python -m bench.kernels --device {ceilings['device']}`)\n",
        f"Measured in the same run: {ceilings['read_gb_s']:.0f} GB/s read, {ceilings['copy_gb_s']:.0f} GB/s copied, "
        f"{ceilings['bf16_tflop_s']:.2f} TFLOP/s in bfloat16 and {ceilings['f32_tflop_s']:.2f} in float32 products"
        f"{_threads(ceilings)}.",
        "Each cell is microseconds and the share of the roofline, the slower of memory and arithmetic at those",
        "ceilings; more than 100 % means that a cache served what memory was counted for.\n",
        *(f"### {title}\n\n{comparison(chosen)}" for title, chosen in _kinds(rows, operations) if chosen),
    ]
    for title, entries in (("Decode steps", "decode_steps"), ("Launches", "launch_gaps"), ("Aims", "aims")):
        if results.get(entries):
            lines.append(f"### {title}\n\n{listing(results[entries])}")
    return lines


def comparison(rows: Rows) -> str:
    """One line per kernel and shape, one column per implementation."""
    names = list(dict.fromkeys(row["by"] for row in rows))
    lines: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        lines.setdefault((row["kernel"], row["shape"]), {})[row["by"]] = row
    cells = [
        (*key, f"{first['flops_per_byte']:.1f}", first["bound"], *(_cell(by.get(name)) for name in names))
        for key, by in lines.items()
        for first in [next(iter(by.values()))]
    ]
    return table(("kernel", "shape", "flop/byte", "bound", *names), cells)


def listing(entries: Rows) -> str:
    """One line per entry, its keys as header."""
    return table(tuple(entries[0]), [tuple(map(_text, entry.values())) for entry in entries])


def _kinds(rows: Rows, operations: Rows) -> list[tuple[str, Rows]]:
    return [
        ("Decode attention", [row for row in rows if row["kernel"] == "decode"]),
        ("Prefill attention", [row for row in rows if row["kernel"] == "prefill"]),
        ("Linear maps and small operations", operations),
    ]


def _threads(ceilings: dict[str, Any]) -> str:
    return f", {ceilings['threads']} threads" if ceilings["threads"] else ""


def _cell(row: dict[str, Any] | None) -> str:
    return "–" if row is None else f"{row['time_us']:.1f} ({row['share_of_ceiling']:.0%})"


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
