"""Drawings: of a load test the cumulative distribution of each latency; of goodput, attainment against the rate.

Needs matplotlib.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from bench.goodput_search import ATTAINMENT
from bench.report import LoadReport


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(report: LoadReport, path: Path) -> None:
    """Writes the plot; the suffix of `path` decides the format. Raises OSError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots(1, 2)
    limits_s = {"ttft": report.options.slo_ttft_s, "itl": report.options.slo_itl_s}
    for axis, name in zip(axes, limits_s, strict=True):
        values = sorted(report.latencies_s[name])
        axis.plot(
            [value * 1e3 for value in values],
            [(rank + 1) / len(values) for rank in range(len(values))],
            drawstyle="steps-post",
        )
        limit_s = limits_s[name]
        if limit_s is not None:
            axis.axvline(limit_s * 1e3, linestyle="--", color="grey", label="SLO")
            axis.legend()
        axis.set(title=name, xlabel="ms", ylabel="share of values", ylim=(0, 1.02))
    figure.suptitle(report.as_text().splitlines()[0])
    figure.savefig(path)


def draw_goodput(results: dict[str, Any], path: Path) -> None:
    """One panel per load of `bench.goodput`'s record, one curve per server. Raises OSError."""
    from matplotlib.figure import Figure

    loads = results["loads"]
    figure = Figure(figsize=(5 * len(loads), 4), layout="constrained")
    for axis, (name, load) in zip(figure.subplots(1, len(loads), squeeze=False).flat, loads.items(), strict=True):
        for server, each in load["servers"].items():
            points = sorted((trial["rate_per_s"], trial["attainment"]) for trial in each["trials"])
            axis.plot(*zip(*points, strict=True), marker="o", label=server)
        axis.axhline(ATTAINMENT, linestyle="--", color="grey")
        axis.set(title=name, xlabel="requests per second", ylabel="share within both objectives", ylim=(0, 1.02))
        axis.set_xlim(left=0)
        axis.grid(visible=True, alpha=0.3)
    figure.axes[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
