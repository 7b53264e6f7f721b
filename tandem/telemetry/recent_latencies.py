"""Latencies and rates of the last minute, for people who look: quantiles, requests and tokens per second.

A ring of slots of a few seconds each; a slot holds one histogram per latency, with bounds that
grow by a fixed factor, so that a quantile is off by less than half of that factor (2.5 %). A
slot is emptied when its turn comes again: nothing runs in between, and memory is fixed.
Prometheus computes its own from `metrics`; this needs no Prometheus.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tandem.clock import Clock
from tandem.cluster_status import LatencySummary

TIME_TO_FIRST_TOKEN = "time_to_first_token"
INTER_TOKEN = "inter_token"
END_TO_END = "end_to_end"

_GROWTH = math.log(1.05)
_SHORTEST_S = 1e-4
_NUM_BOUNDS = 340
"""0.1 ms to 1600 s; what lies outside counts as the nearest."""


@dataclass(frozen=True, slots=True)
class RecentRates:
    """What was done per second over the last `window_s`."""

    window_s: float
    """Shorter than the full window while the process is young."""
    requests_per_s: float
    """Requests that ended, whatever way."""
    tokens_per_s: float


class _Slot:
    """What was counted in one stretch of time."""

    def __init__(self) -> None:
        self.number = -1
        self.requests = 0
        self.tokens = 0
        self.counts: dict[str, list[int]] = {}

    def begin(self, number: int) -> None:
        self.number = number
        self.requests = 0
        self.tokens = 0
        self.counts = {name: [0] * _NUM_BOUNDS for name in (TIME_TO_FIRST_TOKEN, INTER_TOKEN, END_TO_END)}


class RecentLatencies:
    """Counts as things happen, on the clock given; adds up when asked. Single-threaded."""

    def __init__(self, clock: Clock, *, window_s: float = 60.0, slot_s: float = 5.0) -> None:
        self._clock = clock
        self._slot_s = slot_s
        self._slots = tuple(_Slot() for _ in range(round(window_s / slot_s)))
        self._began_s = clock.now_s()
        self._total_requests = 0
        self._total_tokens = 0

    @property
    def total_requests(self) -> int:
        """Requests that ended since the start, whatever way."""
        return self._total_requests

    @property
    def total_tokens(self) -> int:
        """Tokens since the start."""
        return self._total_tokens

    def first_token(self, seconds: float) -> None:
        """A request's first token came `seconds` after its arrival."""
        slot = self._count_tokens(1)
        slot.counts[TIME_TO_FIRST_TOKEN][_bound(seconds)] += 1

    def inter_token(self, seconds: float, num_tokens: int) -> None:
        """`num_tokens` further tokens of a request came, `seconds` each after the one before."""
        slot = self._count_tokens(num_tokens)
        slot.counts[INTER_TOKEN][_bound(seconds)] += num_tokens

    def finished(self, seconds: float) -> None:
        """A request came to its last token, `seconds` after its arrival."""
        slot = self._count_request()
        slot.counts[END_TO_END][_bound(seconds)] += 1

    def broken_off(self) -> None:
        """A request ended without its last token: it counts in the rate, not in the latencies."""
        self._count_request()

    def summary(self) -> tuple[LatencySummary, ...]:
        """Time to first token, inter-token, end to end, in this order."""
        live = self._live()
        return tuple(_summarize(name, live) for name in (TIME_TO_FIRST_TOKEN, INTER_TOKEN, END_TO_END))

    def rates(self) -> RecentRates:
        """Requests and tokens per second."""
        now_s = self._clock.now_s()
        oldest_s = (int(now_s / self._slot_s) - len(self._slots) + 1) * self._slot_s
        window_s = max(now_s - max(oldest_s, self._began_s), 1.0)
        live = self._live()
        return RecentRates(
            window_s=window_s,
            requests_per_s=sum(slot.requests for slot in live) / window_s,
            tokens_per_s=sum(slot.tokens for slot in live) / window_s,
        )

    def _count_tokens(self, num_tokens: int) -> _Slot:
        self._total_tokens += num_tokens
        slot = self._slot()
        slot.tokens += num_tokens
        return slot

    def _count_request(self) -> _Slot:
        self._total_requests += 1
        slot = self._slot()
        slot.requests += 1
        return slot

    def _slot(self) -> _Slot:
        number = int(self._clock.now_s() / self._slot_s)
        slot = self._slots[number % len(self._slots)]
        if slot.number != number:
            slot.begin(number)
        return slot

    def _live(self) -> list[_Slot]:
        newest = int(self._clock.now_s() / self._slot_s)
        return [slot for slot in self._slots if slot.number > newest - len(self._slots) and slot.counts]


def _bound(seconds: float) -> int:
    """Number of the histogram's bound nearest to a latency."""
    if seconds <= _SHORTEST_S:
        return 0
    return min(_NUM_BOUNDS - 1, round(math.log(seconds / _SHORTEST_S) / _GROWTH))


def _summarize(name: str, slots: Iterable[_Slot]) -> LatencySummary:
    counts = [0] * _NUM_BOUNDS
    for slot in slots:
        counts = [total + count for total, count in zip(counts, slot.counts[name], strict=True)]
    count = sum(counts)
    return LatencySummary(
        name, count, _quantile(counts, count, 0.5), _quantile(counts, count, 0.9), _quantile(counts, count, 0.99)
    )


def _quantile(counts: list[int], total: int, share: float) -> float:
    """The latency that `share` of all do not exceed."""
    if not total:
        return 0.0
    rank = math.ceil(share * total)
    for number, count in enumerate(counts):
        rank -= count
        if rank <= 0:
            return _SHORTEST_S * math.exp(number * _GROWTH)
    raise AssertionError("counts add up to the total")
