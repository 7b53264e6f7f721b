"""Latencies and rates of the last minute, for people who look: quantiles, requests and tokens per second.

The newest slots of a few seconds each are kept; a slot holds one histogram per latency, with bounds that
grow by a fixed factor, so that a quantile is off by less than half of that factor (2.5 %). Memory is bounded.
Prometheus computes its own from `metrics`; this needs no Prometheus.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field

from shell.clock import Clock
from tandem.cluster_status import LatencySummary, PlacementCount, RecentActivity
from tandem.types import PlacementReason

_LATENCIES = ("time_to_first_token", "inter_token", "end_to_end")
_TIME_TO_FIRST_TOKEN, _INTER_TOKEN, _END_TO_END = _LATENCIES
_GROWTH = math.log(1.05)
_SHORTEST_S = 1e-4
_NUM_BOUNDS = 340
"""0.1 ms to 1600 s; what lies outside counts as the nearest."""


@dataclass(slots=True)
class _Slot:
    """What was counted from `number * slot_s` on, for `slot_s`."""

    number: int
    requests: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    counts: dict[str, Counter[int]] = field(default_factory=lambda: {name: Counter() for name in _LATENCIES})
    """By latency and by number of the nearest bound."""


class RecentLatencies:
    """Counts as things happen, on the clock given; adds up when asked. Single-threaded."""

    def __init__(self, clock: Clock, *, window_s: float = 60.0, slot_s: float = 5.0) -> None:
        self._clock = clock
        self._slot_s = slot_s
        self._num_slots = round(window_s / slot_s)
        self._slots: deque[_Slot] = deque(maxlen=self._num_slots)
        """Slots in ascending order of number, empty slots left out."""
        self._slot_ends_s = -math.inf
        """End of the latest slot."""
        self._began_s = clock.now_s()
        self._total_requests = 0
        self._total_tokens = 0
        self._placements: Counter[PlacementReason] = Counter()

    def first_token(self, seconds: float) -> None:
        """A request's first token came `seconds` after its arrival."""
        self._count_tokens(_TIME_TO_FIRST_TOKEN, seconds, 1)

    def inter_token(self, seconds: float, num_tokens: int) -> None:
        """`num_tokens` further tokens of a request came, `seconds` each after the one before."""
        self._count_tokens(_INTER_TOKEN, seconds, num_tokens)

    def finished(self, seconds: float) -> None:
        """A request came to its last token, `seconds` after its arrival."""
        self.broken_off()
        self._slot().counts[_END_TO_END][_bound(seconds)] += 1

    def broken_off(self) -> None:
        """A request ended without its last token: it counts in the rate, not in the latencies."""
        self._total_requests += 1
        self._slot().requests += 1

    def prompt_computed(self, num_tokens: int, num_cached_tokens: int) -> None:
        """A request's prompt was computed, but for the tokens whose KV a worker had already."""
        slot = self._slot()
        slot.prompt_tokens += num_tokens
        slot.cached_tokens += num_cached_tokens

    def placed(self, reason: PlacementReason) -> None:
        """A pair of workers was chosen for a request."""
        self._placements[reason] += 1

    def activity(self) -> RecentActivity:
        """Returns the activity within the window, which is shorter in a young process, and since the start."""
        now_s = self._clock.now_s()
        oldest = int(now_s / self._slot_s) - self._num_slots + 1
        window_s = max(now_s - max(oldest * self._slot_s, self._began_s), 1.0)
        live = [slot for slot in self._slots if slot.number >= oldest]
        return RecentActivity(
            window_s=window_s,
            requests_per_s=sum(slot.requests for slot in live) / window_s,
            tokens_per_s=sum(slot.tokens for slot in live) / window_s,
            latencies=tuple(_summarize(name, [slot.counts[name] for slot in live]) for name in _LATENCIES),
            total_requests=self._total_requests,
            total_tokens=self._total_tokens,
            placements=tuple(PlacementCount(str(reason), count) for reason, count in self._placements.most_common()),
            prompt_tokens=sum(slot.prompt_tokens for slot in live),
            cached_tokens=sum(slot.cached_tokens for slot in live),
        )

    def _count_tokens(self, latency: str, seconds: float, num_tokens: int) -> None:
        self._total_tokens += num_tokens
        slot = self._slot()
        slot.tokens += num_tokens
        slot.counts[latency][_bound(seconds)] += num_tokens

    def _slot(self) -> _Slot:
        now_s = self._clock.now_s()
        if now_s >= self._slot_ends_s:
            number = int(now_s / self._slot_s)
            self._slots.append(_Slot(number))
            self._slot_ends_s = (number + 1) * self._slot_s
        return self._slots[-1]


def _bound(seconds: float) -> int:
    """Number of the histogram's bound nearest to a latency."""
    if seconds <= _SHORTEST_S:
        return 0
    return min(_NUM_BOUNDS - 1, round(math.log(seconds / _SHORTEST_S) / _GROWTH))


def _summarize(name: str, slots: list[Counter[int]]) -> LatencySummary:
    counts = sum(slots, Counter[int]())
    return LatencySummary(name, counts.total(), *(_quantile(counts, share) for share in (0.5, 0.9, 0.99)))


def _quantile(counts: Counter[int], share: float) -> float:
    """The latency that `share` of all do not exceed; 0 of none."""
    rank = math.ceil(share * counts.total())
    for number, count in sorted(counts.items()):
        rank -= count
        if rank <= 0:
            return _SHORTEST_S * math.exp(number * _GROWTH)
    return 0.0
