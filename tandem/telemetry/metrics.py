"""One process's metrics: what was counted and what is read, as Prometheus text.

    observers ─add, observe─▶ Counter, Cells ─┐
    queues, pools, registry ──── Reader ──────┴─ at scrape time ─▶ exposition()

State is read when somebody asks, so it costs nothing in between. Shows the metrics that
`metric_names` declares for the process, and their aliases. Single-threaded: call
`exposition` on the loop that counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from tandem import __version__
from tandem.errors import InternalError
from tandem.telemetry import metric_names, vllm_names
from tandem.telemetry.metric import Kind, Labels, Metric, Process
from tandem.telemetry.tallies import Cells, Counter


@dataclass(frozen=True, slots=True)
class Reading:
    """What a gauge or counter stands at."""

    metric: Metric
    value: float
    labels: Labels = ()


Reader = Callable[[], Iterable[Reading]]
"""Looks at something and tells its figures, at each scrape. Must neither raise nor take long."""


@dataclass(frozen=True, slots=True)
class _View:
    """One name under which `metric` is shown: its own, or an alias with other buckets and more labels."""

    metric: Metric
    name: str
    text: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...]
    fixed: Labels = ()
    """Values of the labels that stand before the metric's own."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Other words for the metric's label values."""

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
            shown = each.cumulative(self.buckets)
            buckets = [(floatToGoString(bound), float(count)) for bound, count in shown]  # type: ignore[no-untyped-call]
            family.add_metric(self._label_values(labels), buckets, each.sum)
        return family

    def _label_values(self, labels: Labels) -> Labels:
        return (*self.fixed, *(self.words.get(value, value) for value in labels))


def _views(process: Process, model: str) -> Iterator[_View]:
    """Everything that `process` shows, in the order of the declarations."""
    for metric in metric_names.ALL:
        if process in metric.on:
            yield _View(metric, metric.name, metric.text, tuple(metric.labels), metric.buckets)
    for alias in vllm_names.ALL:
        for metric in alias.of:
            if process in metric.on:
                labels = ("model_name", "engine", *(alias.labels or metric.labels))
                fixed = (model, vllm_names.ENGINE)
                yield _View(metric, alias.name, alias.text, labels, alias.buckets, fixed, alias.label_values)


class Metrics(Collector):
    """Made once per process; observers take their tallies from it."""

    def __init__(self, process: Process, model: str, worker_id: str = "") -> None:
        self._process = process
        self._views = tuple(_views(process, model))
        self._counters: dict[Metric, Counter] = {}
        self._histograms: dict[Metric, dict[Labels, Cells]] = {}
        self._readers: list[Reader] = []
        self._shown: tuple[Metric, ...] = ()
        identity = (__version__, str(process), model, worker_id)
        self.add_reader(lambda: [Reading(metric_names.BUILD_INFO, 1, identity)])
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def counter(self, metric: Metric) -> Counter:
        """What counts this metric; the same for each call."""
        self._check(metric, Kind.COUNTER)
        return self._counters.setdefault(metric, Counter(metric.presets))

    def histogram(self, metric: Metric, *labels: str) -> Cells:
        """What observes this metric with these values of its labels; the same for each call."""
        self._check(metric, Kind.HISTOGRAM)
        if metric not in self._histograms:
            bounds = {bound for view in self._views if view.metric is metric for bound in view.buckets}
            self._histograms[metric] = {each: Cells(sorted(bounds)) for each in metric.presets}
        return self._histograms[metric][labels]

    def add_reader(self, reader: Reader, *shown: Metric) -> None:
        """Asks `reader` at each scrape from now on. `shown` is named even while it has nothing to tell of it."""
        self._readers.append(reader)
        self._shown += shown

    def exposition(self) -> tuple[bytes, str]:
        """The body of a scrape's answer, and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4

    def collect(self) -> Iterator[Family]:
        """Every family that something counts or reads, in the order of the declarations."""
        values: dict[Metric, dict[Labels, float]] = {metric: {} for metric in self._shown}
        for reader in self._readers:
            for reading in reader():
                values.setdefault(reading.metric, {})[reading.labels] = reading.value
        for view in self._views:
            if view.metric in self._histograms:
                yield view.of_cells(self._histograms[view.metric])
            elif view.metric in values:
                yield view.of_values(values[view.metric])
            elif view.metric in self._counters:
                yield view.of_values(self._counters[view.metric].values)

    def _check(self, metric: Metric, kind: Kind) -> None:
        if self._process not in metric.on or metric.kind is not kind:
            raise InternalError(f"{metric.name} is no {kind} of this process")
