"""Time, injected: a monotonic clock, and deadlines by that clock."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

_TIMER_SLACK_S = 0.05
"""How late a busy process may begin to count a call's time."""


class Clock(Protocol):
    """A monotonic clock local to this process."""

    def now_s(self) -> float:
        """Seconds since some fixed point."""


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        """Seconds since some fixed point."""
        return time.monotonic()


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on a clock; None = never."""

    clock: Clock
    at_s: float | None

    @classmethod
    def after(cls, clock: Clock, seconds: float | None) -> Deadline:
        """The point `seconds` from now; None = never."""
        return cls(clock, None if seconds is None else clock.now_s() + seconds)

    @property
    def passed(self) -> bool:
        """Whether the deadline has passed."""
        return self.at_s is not None and self.clock.now_s() >= self.at_s

    def remaining_s(self) -> float | None:
        """Seconds left, never negative; None = no end."""
        return None if self.at_s is None else max(0.0, self.at_s - self.clock.now_s())


def ended_by_deadline(passed_s: float, left_s: float | None) -> bool:
    """Whether a call that was cancelled after `passed_s`, with `left_s` to go, ran out of time.

    gRPC rounds a timeout up on the wire, by a hundredth at most, so that the caller's own timer, which
    cancels the call, comes before that of the one who is called.
    """
    return left_s is not None and left_s <= _TIMER_SLACK_S + (passed_s + left_s) / 100
