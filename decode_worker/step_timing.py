"""When to launch a step behind the one in flight: shortly before that is expected to end.

Launched at once, it would leave out every request that arrives while the first one still computes. Launched too late,
the engine is idle for as long as planning takes. Steps of similar size take similar time, so the last ones tell; where
times vary, the shorter ones count more.
"""

from __future__ import annotations

MIN_LEAD_S = 0.002
_LEAD_IN_PLANS = 2.0
"""How many times the usual planning time a step is launched ahead."""
_WEIGHT_BELOW, _WEIGHT_ABOVE = 0.5, 0.1
"""Of the newest measurement in a moving average, if it lies below or above."""


class StepTiming:
    """Moving averages; all times in seconds."""

    def __init__(self) -> None:
        self._step_s: dict[int, float] = {}
        """By size class: steps of `[2**(c-1), 2**c)` seqs."""
        self._planning_s = 0.0

    def step_took(self, num_seqs: int, seconds: float) -> None:
        """A decode step has ended."""
        size = num_seqs.bit_length()
        self._step_s[size] = _averaged(self._step_s.get(size, seconds), seconds)

    def planning_took(self, seconds: float) -> None:
        """A step was planned and launched."""
        self._planning_s = _averaged(self._planning_s, seconds)

    def launch_after_s(self, num_seqs: int) -> float | None:
        """How long after the start of a decode step of `num_seqs` seqs the next one is to be launched.

        None = no step of this size was seen yet. Not negative.
        """
        expected_s = self._step_s.get(num_seqs.bit_length())
        lead_s = max(MIN_LEAD_S, _LEAD_IN_PLANS * self._planning_s)
        return None if expected_s is None else max(0.0, expected_s - lead_s)


def _averaged(average: float, newest: float) -> float:
    weight = _WEIGHT_BELOW if newest < average else _WEIGHT_ABOVE
    return average + weight * (newest - average)
