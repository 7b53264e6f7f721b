"""Whether a worker's engine gets on: it does while it has nothing to run, or makes steps. Pure.

The event loop needs no watch of its own: a process that answers has one that turns.
"""

from __future__ import annotations

from tandem.clock import Clock
from tandem.types import WorkerLoad

STALL_S = 120.0
"""Without a step for so long, with sequences in the batch, the process is worth ending. Four times what makes routers
turn away: they lose nothing by it, whereas a new process loads its weights again."""


class ProgressWatch:
    """Looks at one engine's load again and again; `observe` it at least a few times per `stall_s`."""

    def __init__(self, clock: Clock, stall_s: float = STALL_S) -> None:
        self._clock = clock
        self._stall_s = stall_s
        self._moved_s = clock.now_s()
        self._engine_steps: int | None = None

    def observe(self, load: WorkerLoad) -> bool:
        """Whether the engine gets on, as of now."""
        if load.running_seqs == 0 or load.engine_steps != self._engine_steps:
            self._moved_s = self._clock.now_s()
        self._engine_steps = load.engine_steps
        return self._clock.now_s() - self._moved_s < self._stall_s
