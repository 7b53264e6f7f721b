"""What the last requests and hand-offs were like, for people who ask why: where prompts were computed, which requests
were slow, what went from whom to whom. Counts as things happen; memory is bounded. Single-threaded.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from statistics import median

from shell.clock import Clock
from tandem.cluster_status import (
    NOT_PLACED,
    NOT_PLACED_TEXT,
    PLACEMENT_TEXTS,
    HandoffPair,
    PlacementCount,
    SlowRequest,
)
from tandem.types import UNKNOWN_ROUTE, KvRoute, PlacementReason, WorkerId

_MOST_REQUESTS = 1000
_MOST_SLOW = 10
_MOST_PAIRS = 256
_MOST_SECONDS = 101
"""Hand-offs of a pair that the median is of."""


@dataclass(slots=True)
class _Pair:
    """Hand-offs from one worker to another."""

    count: int = 0
    num_bytes: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_SECONDS))
    route: KvRoute = UNKNOWN_ROUTE


class RecentRequests:
    """Keeps the last requests that ended, and the pairs of workers between which KV went last."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ended: deque[tuple[float, SlowRequest, PlacementReason | None]] = deque(maxlen=_MOST_REQUESTS)
        """Each with the time of its end."""
        self._pairs: dict[tuple[WorkerId, WorkerId], _Pair] = {}

    def ended(self, request: SlowRequest, reason: PlacementReason | None) -> None:
        """A request ended just now, which was placed for `reason`; None = it was not placed."""
        self._ended.append((self._clock.now_s(), request, reason))

    def handed_over(self, source: WorkerId, target: WorkerId, num_bytes: int, seconds: float, route: KvRoute) -> None:
        """KV of a request went from `source` to `target`."""
        pair = self._pairs.pop((source, target), None) or _Pair()
        self._pairs[source, target] = pair  # the last one in order is the last one used
        if len(self._pairs) > _MOST_PAIRS:
            del self._pairs[next(iter(self._pairs))]
        pair.count += 1
        pair.num_bytes += num_bytes
        pair.seconds.append(seconds)
        pair.route = route

    def placements(self) -> tuple[PlacementCount, ...]:
        """Returns the last requests by the reason of their placement, most frequent first."""
        counts = Counter(reason for _, _, reason in self._ended)
        return tuple(
            PlacementCount(NOT_PLACED, count, NOT_PLACED_TEXT)
            if reason is None
            else PlacementCount(reason, count, PLACEMENT_TEXTS[reason])
            for reason, count in counts.most_common()
        )

    def slowest(self) -> tuple[SlowRequest, ...]:
        """Returns the slowest of the last requests, slowest first."""
        now_s = self._clock.now_s()
        slow = sorted(self._ended, key=lambda each: -each[1].total_s)[:_MOST_SLOW]
        return tuple(replace(request, age_s=now_s - ended_s) for ended_s, request, _ in slow)

    def handoffs(self) -> tuple[HandoffPair, ...]:
        """Returns the pairs by name."""
        return tuple(
            HandoffPair(
                *(source, target, pair.count, pair.num_bytes, median(pair.seconds)),
                transport=pair.route.transport,
                passed_over=pair.route.passed_over,
            )
            for (source, target), pair in sorted(self._pairs.items())
        )
