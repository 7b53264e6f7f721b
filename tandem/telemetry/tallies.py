"""Counters and histograms that are cheap to add to: plain numbers, no locks, one thread.

prometheus_client's own take a lock and walk the buckets: 0.65 µs per observation, against
0.15 µs here, and a router that observes every token under three names would pay it three
times. Aliases share one histogram instead: it counts between the bounds of all of them, and
each name shows the sums over its own.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tandem.telemetry.metric import Labels


class Counter:
    """Numbers that only rise, by label values."""

    __slots__ = ("_values",)

    def __init__(self, presets: Iterable[Labels]) -> None:
        self._values: dict[Labels, float] = dict.fromkeys(presets, 0)

    def add(self, amount: float, *labels: str) -> None:
        """Adds `amount`, not below 0."""
        self._values[labels] = self._values.get(labels, 0) + amount

    @property
    def values(self) -> Mapping[Labels, float]:
        """What was counted."""
        return self._values


class Cells:
    """One histogram's counts, for one set of label values."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: ascending upper bounds, without infinity."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts `value`, as often as told."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    @property
    def sum(self) -> float:
        """Of all that was observed."""
        return self._sum

    def cumulative(self, bounds: Iterable[float]) -> Iterator[tuple[float, int]]:
        """(bound, how many did not exceed it), for each of `bounds` and infinity.

        `bounds` are ascending and among this one's own.
        """
        for bound in (*bounds, math.inf):
            yield bound, sum(self._counts[: bisect_left(self._bounds, bound) + 1])
