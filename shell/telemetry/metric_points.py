"""A process's metrics in OpenTelemetry's data model: the series that Prometheus is shown, under the same names.

The names of vLLM are left out: instruments of OpenTelemetry have no colon. Sums and histograms count from the start of
the process (cumulative).
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from shell.telemetry.metric import Kind, Labels
from shell.telemetry.metrics import Cells, Metrics, View
from tandem import __version__

_UNITS = {"_seconds": "s", "_bytes": "By", "_seconds_total": "s", "_bytes_total": "By"}
"""Units by the ends of names."""


class MetricPoints:
    """Reads the metrics of a process. To be made when the process starts."""

    def __init__(self, metrics: Metrics, resource: Resource) -> None:
        self._metrics = metrics
        self._resource = resource
        self._began_ns = time.time_ns()

    def read(self) -> MetricsData:
        """Returns all points now. Called on the loop that counts."""
        found = [each for each in self._metrics.shown(self._number, self._histogram) if each is not None]
        scope = ScopeMetrics(InstrumentationScope("tandem", __version__), found, "")
        return MetricsData([ResourceMetrics(self._resource, [scope], "")])

    def _number(self, view: View, values: Mapping[Labels, float]) -> Metric | None:
        now_ns = time.time_ns()
        points = [
            NumberDataPoint(_attributes(view, labels), self._began_ns, now_ns, value)
            for labels, value in view.series(values)
        ]
        if view.metric.kind is Kind.GAUGE:
            return _metric(view, Gauge(points))
        return _metric(view, Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True))

    def _histogram(self, view: View, cells: Mapping[Labels, Cells]) -> Metric | None:
        now_ns, points = time.time_ns(), []
        for labels, each in view.series(cells):
            up_to = [count for _, count in each.cumulative(view.buckets)]
            counts = [count - below for below, count in zip((0, *up_to), up_to, strict=False)]
            bounds, attributes = list(view.buckets), _attributes(view, labels)
            points.append(
                HistogramDataPoint(
                    *(attributes, self._began_ns, now_ns, up_to[-1], each.sum, counts, bounds),
                    min=None,  # type: ignore[arg-type]  # optional in the protocol, and not known
                    max=None,  # type: ignore[arg-type]
                )
            )
        return _metric(view, Histogram(points, AggregationTemporality.CUMULATIVE))


def _metric(view: View, data: Gauge | Sum | Histogram) -> Metric | None:
    if ":" in view.name:
        return None
    unit = "s" if "." in view.name else next((unit for end, unit in _UNITS.items() if view.name.endswith(end)), "")
    return Metric(view.name, view.text, unit, data)


def _attributes(view: View, labels: Labels) -> dict[str, str]:
    """Returns the labels; an empty one means that there is none."""
    return {name: value for name, value in zip(view.labels, labels, strict=True) if value}
