"""A metric as it is shown: under its own name, or under an alias with other buckets and more labels. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family

from tandem.telemetry.metric import Alias, Kind, Labels, Metric
from tandem.telemetry.tallies import Cells

_MODEL_LABELS = ("model_name", "engine")


@dataclass(frozen=True, slots=True)
class View:
    """One name under which `metric` is shown."""

    metric: Metric
    name: str
    text: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...]
    fixed: Labels = ()
    """Values of the labels that stand before the metric's own."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Other words for the metric's label values."""

    @classmethod
    def own(cls, metric: Metric) -> View:
        """As declared."""
        return cls(metric, metric.name, metric.text, metric.labels, metric.buckets)

    @classmethod
    def of_alias(cls, alias: Alias, metric: Metric, model: str, engine: str) -> View:
        """As `alias` shows it."""
        labels = (*_MODEL_LABELS, *(alias.labels or metric.labels))
        return cls(metric, alias.name, alias.text, labels, alias.buckets, (model, engine), alias.label_values)

    def of_values(self, values: Mapping[Labels, float]) -> Family:
        """The family of a counter or gauge."""
        make = CounterMetricFamily if self.metric.kind is Kind.COUNTER else GaugeMetricFamily
        family = make(self.name, self.text, labels=self.labels)
        for labels, value in values.items():
            family.add_metric(self._label_values(labels), value)
        return family

    def of_cells(self, cells: Mapping[Labels, Cells]) -> Family:
        """The family of a histogram."""
        family = HistogramMetricFamily(self.name, self.text, labels=self.labels)
        for labels, each in cells.items():
            buckets = [(_bound_text(bound), float(count)) for bound, count in each.cumulative(self.buckets)]
            family.add_metric(self._label_values(labels), buckets, each.sum)
        return family

    def _label_values(self, labels: Labels) -> Labels:
        return (*self.fixed, *(self.words.get(value, value) for value in labels))


def _bound_text(bound: float) -> str:
    """A bucket's bound as Prometheus writes it."""
    return "+Inf" if bound == math.inf else repr(float(bound))
