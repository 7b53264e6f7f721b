"""Goodput: the highest rate at which enough requests meet their objectives, found by a bounded search. Pure."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from simulator.outcomes import quantile

ATTAINMENT = 0.9
"""Share of the requests that must meet both objectives."""
ITL_QUANTILE = 0.95
TTFT_FACTOR, ITL_FACTOR = 8.0, 3.0
"""Objectives, times the best server's unloaded figures."""


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a caller is to be given."""

    ttft_s: float
    """From the time at which the request is due."""
    itl_s: float
    """On the 95th percentile of a request's own gaps between messages."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one caller met."""

    ttft_s: float
    itl_s: float
    """The 95th percentile of its gaps; 0 if it had none."""
    failed: bool = False

    @classmethod
    def of(cls, due_s: float, arrivals_s: Sequence[float]) -> Outcome:
        """From when each message with tokens came; at least one did."""
        gaps_s = [later - earlier for earlier, later in pairwise(arrivals_s)]
        return cls(arrivals_s[0] - due_s, quantile(sorted(gaps_s), ITL_QUANTILE) if gaps_s else 0.0)

    def misses_first(self, objectives: Objectives) -> bool:
        """Whether its first token came late, or never."""
        return self.failed or self.ttft_s > objectives.ttft_s

    def misses_between(self, objectives: Objectives) -> bool:
        """Whether it waited too long between tokens."""
        return self.failed or self.itl_s > objectives.itl_s

    def attains(self, objectives: Objectives) -> bool:
        """Whether it met both."""
        return not self.misses_first(objectives) and not self.misses_between(objectives)


FAILED = Outcome(math.inf, math.inf, failed=True)


@dataclass(frozen=True, slots=True)
class Effort:
    """How thoroughly is measured."""

    requests: int
    """Of each stretch of a trial."""
    least_s: float
    """A trial has as many stretches as arrive in this time: at high rates one is short, and tells little."""
    turns: int
    """In how many parts a trial's stretches are measured, at most; between them other servers have their turns."""
    close: float
    """A trial that attains so much more or less than it must goes on with as many other arrivals, and all count."""
    unloaded: int
    """Requests alone, of each load on each server."""
    ratio: float
    """Between neighbouring rates."""
    first_stride: int
    """Steps of the grid between the first two trials."""
    trials: int
    """At most, for each search."""
    rounds: int
    """Of the parts without a search."""
    leaves_early: bool
    """Whether a trial ends as soon as it is lost, and not closely."""
    longest_s: float
    """Until all requests of a trial have arrived: lower rates are not tried."""


FULL = Effort(
    requests=80,
    least_s=180,
    turns=3,
    close=0.02,
    unloaded=9,
    ratio=1.1,
    first_stride=4,
    trials=9,
    rounds=3,
    leaves_early=False,
    longest_s=1200,
)
QUICK = Effort(
    requests=40,
    least_s=60,
    turns=2,
    close=0.035,
    unloaded=4,
    ratio=1.2,
    first_stride=2,
    trials=5,
    rounds=3,
    leaves_early=True,
    longest_s=300,
)


def misses_allowed(num_requests: int, close: float = 0.0) -> int:
    """Of so many requests, how many may miss; with `close`, how many miss at most where the trial is lost closely."""
    return num_requests - math.ceil(num_requests * (ATTAINMENT - close))


def num_stretches(rate_per_s: float, requests: int, least_s: float) -> int:
    """Of so many requests each, how many a trial needs to last `least_s`; at least one."""
    return max(1, math.ceil(least_s * rate_per_s / requests))


def on_grid(rate_per_s: float, ratio: float) -> float:
    """The nearest power of `ratio`: searches that begin there try the same rates, and so meet the same arrivals."""
    return ratio ** round(math.log(rate_per_s) / math.log(ratio))


class RateSearch:
    """Bisection over the rates `first_per_s * ratio ** index`, after strides that double until both sides are known.

    Every trial is told with its rate; the search ends when neighbours on the grid are known to pass and to fail, after
    `max_trials`, or when the lowest rate of the grid that is not below `least_per_s` has failed; it begins at
    `least_per_s` if `first_per_s` is below it.
    """

    def __init__(
        self, first_per_s: float, ratio: float, first_stride: int, max_trials: int, least_per_s: float = 0.0
    ) -> None:
        self._first_per_s = max(first_per_s, least_per_s)
        self._ratio = ratio
        self._stride = first_stride
        self._trials_left = max_trials
        self._least_per_s = least_per_s
        self._passed: int | None = None
        self._failed: int | None = None

    @property
    def next_per_s(self) -> float | None:
        """The rate to try; None at the end."""
        index = self._next_index()
        return None if index is None else self._rate(index)

    @property
    def passed_per_s(self) -> float | None:
        """The highest rate that passed."""
        return None if self._passed is None else self._rate(self._passed)

    @property
    def failed_per_s(self) -> float | None:
        """The lowest rate that failed."""
        return None if self._failed is None else self._rate(self._failed)

    def tell(self, *, passed: bool) -> None:
        """The outcome at `next_per_s`."""
        index = self._next_index()
        assert index is not None
        was_one_sided = self._passed is None or self._failed is None
        has_begun = self._passed is not None or self._failed is not None
        if passed:
            self._passed = index
        else:
            self._failed = index
        self._trials_left -= 1
        if has_begun and was_one_sided:
            self._stride *= 2

    def _next_index(self) -> int | None:
        if self._trials_left == 0:
            return None
        if self._passed is None and self._failed is None:
            return 0
        if self._failed is None:
            assert self._passed is not None
            return self._passed + self._stride
        if self._passed is None:
            index = max(self._failed - self._stride, self._least_index)
            return index if index < self._failed else None
        return (self._passed + self._failed) // 2 if self._failed - self._passed > 1 else None

    @property
    def _least_index(self) -> int:
        if self._least_per_s <= 0:
            return -sys.maxsize
        return math.ceil(math.log(self._least_per_s / self._first_per_s) / math.log(self._ratio) - 1e-9)

    def _rate(self, index: int) -> float:
        return self._first_per_s * self._ratio**index
