"""Draws the cumulative distribution of each latency of a load test; needs matplotlib."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from cli.load.report import LoadReport


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
