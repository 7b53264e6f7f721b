"""How a metric is declared: its name, kind, text, labels, buckets, and the processes that have it. Plain data."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Labels = tuple[str, ...]
"""Values of a metric's labels, in the order of its declaration."""


class Kind(enum.StrEnum):
    """Kinds of metric in Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Process(enum.StrEnum):
    """Who exposes metrics."""

    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    ELASTIC = "elastic"


DECODING = (Process.DECODE, Process.ELASTIC)
WORKERS = (Process.PREFILL, *DECODING)
EVERYWHERE = tuple(Process)


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One family, named as in PromQL: counters end in `_total`, histograms gain `_bucket`, `_sum`, `_count`."""

    name: str
    text: str
    on: tuple[Process, ...]
    labels: Mapping[str, Iterable[str]] = field(default_factory=dict)
    """All values of each label, if known."""
    buckets: tuple[float, ...] = ()
    """Upper bounds, ascending, without infinity."""

    @property
    def kind(self) -> Kind:
        """Histograms have buckets, counters' names end in `_total`."""
        if self.buckets:
            return Kind.HISTOGRAM
        return Kind.COUNTER if self.name.endswith("_total") else Kind.GAUGE

    @property
    def presets(self) -> tuple[Labels, ...]:
        """Label values that stand at 0 from the start: else the first event of a kind is no increase."""
        return tuple(itertools.product(*(map(str, values) for values in self.labels.values())))


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name for what a metric counts, with labels `model_name` and `engine` before its own."""

    name: str
    text: str
    of: tuple[Metric, ...]
    """What it stands for: on each process, the one that the process has."""
    buckets: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()
    """Its names of the metric's labels."""
    label_values: Mapping[str, str] = field(default_factory=dict)
    """Names of the metric's label values in the alias, where the names differ."""
    only: Labels = ()
    """The metric's label values that the alias stands for alone, and has no labels for; empty = it stands for all."""


def one_two_five(largest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, … up to `largest`."""
    decades = [10**exponent for exponent in range(len(str(largest)))]
    return tuple(float(step * decade) for decade in decades for step in (1, 2, 5) if step * decade <= largest)
