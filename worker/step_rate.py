"""How many steps an engine makes per second, over the last few seconds: for people who look."""

from __future__ import annotations

from collections import deque

SPAN_S = 3.0


class StepRate:
    """Remembers what was seen at the last looks. A worker is looked at several times a second, whoever asks."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=256)
        """Times, and the steps made until then; the first is `SPAN_S` old, or as old as the worker."""

    def look(self, num_steps: int, now_s: float) -> float:
        """Returns the rate, given the steps made so far."""
        self._seen.append((now_s, num_steps))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - SPAN_S:
            self._seen.popleft()
        first_s, num_before = self._seen[0]
        return (num_steps - num_before) / (now_s - first_s) if now_s > first_s else 0.0
