"""Whether a pool is too small for what runs in it, as a pure function of what is seen now and then.

    low ──preempted often in a short time, and little room by now──▶ high
     ◀──no preemption for that time, much room, or a stream has moved──┘

One preemption is no sign of it: it is how a pool is kept full. Again and again, they cost what was computed. What a
victim leaves is available for a moment, hence the shares.
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 10.0
MANY = 3
"""Preemptions within the window that are too many."""
FULL_SHARE, ROOMY_SHARE = 0.25, 0.5
"""Of the pool, available: below the one there is little room, from the other on there is much."""


class Pressure:
    """Of one pool."""

    def __init__(self) -> None:
        self.is_high = False
        self._num_seen = 0
        self._times_s: deque[float] = deque(maxlen=MANY)
        """Of the newest preemptions."""

    def look(self, now_s: float, num_preemptions: int, share_available: float) -> bool:
        """Whether it is high now. `num_preemptions`: since the start; `share_available`: of the pool's blocks."""
        self._times_s.extend([now_s] * min(MANY, num_preemptions - self._num_seen))
        self._num_seen = num_preemptions
        while self._times_s and self._times_s[0] < now_s - WINDOW_S:
            self._times_s.popleft()
        if self.is_high:
            self.is_high = bool(self._times_s) and share_available < ROOMY_SHARE
        else:
            self.is_high = len(self._times_s) == MANY and share_available < FULL_SHARE
        return self.is_high

    def relieved(self) -> None:
        """A stream has moved: what was seen before says nothing any more."""
        self.is_high = False
        self._times_s.clear()
