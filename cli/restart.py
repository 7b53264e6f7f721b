"""When a child that ended is started again, and when there is no point. Pure.

exit 0, unasked      it left on request (Drain): not started again
exit 2               its options or its model are wrong: the whole server gives up
never ready before   gives up after `max_failed_starts` in a row
otherwise            again, after a delay that doubles up to a cap, and starts over once the
                     child has been ready for `healthy_after_s`
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.clock import Clock
from tandem.rpc.process import EXIT_BAD_CONFIG, EXIT_OK


@dataclass(slots=True)
class RestartPolicy:
    """Judges the exits of one child."""

    clock: Clock
    first_delay_s: float = 1.0
    max_delay_s: float = 30.0
    healthy_after_s: float = 30.0
    max_failed_starts: int = 3
    _next_delay_s: float = field(init=False)
    _failed_starts: int = field(default=0, init=False)
    _was_ever_ready: bool = field(default=False, init=False)
    _ready_at_s: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._next_delay_s = self.first_delay_s

    def became_ready(self) -> None:
        """The child printed its address."""
        self._was_ever_ready = True
        self._ready_at_s = self.clock.now_s()

    def restart_delay_s(self, returncode: int) -> float | None:
        """How long to wait before the next start of a child that ended by itself, None = never.

        Negative codes are signals.
        """
        ready_at_s, self._ready_at_s = self._ready_at_s, None
        if returncode in (EXIT_OK, EXIT_BAD_CONFIG):
            return None
        if not self._was_ever_ready:
            self._failed_starts += 1
            if self._failed_starts >= self.max_failed_starts:
                return None
        if ready_at_s is not None and self.clock.now_s() - ready_at_s >= self.healthy_after_s:
            self._next_delay_s = self.first_delay_s
        delay_s = self._next_delay_s
        self._next_delay_s = min(self.max_delay_s, 2 * delay_s)
        return delay_s
