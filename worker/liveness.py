"""Whether a worker's engine makes progress: it has nothing to run, or makes steps. Pure.

The event loop needs no such watch: if it stood still, no probe would be answered.
"""

from __future__ import annotations

from tandem.clock import Clock
from tandem.types import WorkerLoad

STALL_S = 120.0
"""After so long without a step, with sequences in the batch, the process should be ended. Four times the silence after
which routers try elsewhere: that costs them little, whereas a new process loads its weights again."""


class ProgressWatch:
    """Compares one engine's loads over time; to be given one at least a few times per `stall_s`."""

    def __init__(self, clock: Clock, stall_s: float = STALL_S) -> None:
        self._clock = clock
        self._stall_s = stall_s
        self._moved_s = clock.now_s()
        self._engine_steps: int | None = None

    def observe(self, load: WorkerLoad) -> bool:
        """Whether the engine makes progress, as of now."""
        if load.running_seqs == 0 or load.engine_steps != self._engine_steps:
            self._moved_s = self._clock.now_s()
        self._engine_steps = load.engine_steps
        return self._clock.now_s() - self._moved_s < self._stall_s
