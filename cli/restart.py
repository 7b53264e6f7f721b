"""When a child that ended is started again, and when there is no point. Pure.

exit 0, unasked      it left on request (Drain): not started again
exit 2               its options or its model are wrong: the whole server gives up
never ready before   gives up after `max_failed_starts` in a row
otherwise            again, after a delay that doubles up to a cap, and starts over once the
                     child has been ready for `healthy_after_s`
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tandem.clock import Clock
from tandem.rpc.process import EXIT_BAD_CONFIG, EXIT_OK


class Verdict(enum.Enum):
    """What to do about an exit."""

    RESTART = "restart"
    LEFT = "left"
    GIVE_UP = "give up"


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict, and for RESTART how long to wait first."""

    verdict: Verdict
    delay_s: float = 0.0


class RestartPolicy:
    """Judges the exits of one child."""

    def __init__(
        self,
        clock: Clock,
        *,
        first_delay_s: float = 1.0,
        max_delay_s: float = 30.0,
        healthy_after_s: float = 30.0,
        max_failed_starts: int = 3,
    ) -> None:
        self._clock = clock
        self._first_delay_s = first_delay_s
        self._max_delay_s = max_delay_s
        self._healthy_after_s = healthy_after_s
        self._max_failed_starts = max_failed_starts
        self._next_delay_s = first_delay_s
        self._failed_starts = 0
        self._was_ever_ready = False
        self._ready_at_s: float | None = None

    def became_ready(self) -> None:
        """The child printed its address."""
        self._was_ever_ready = True
        self._ready_at_s = self._clock.now_s()

    def exited(self, returncode: int) -> Decision:
        """The child ended by itself; negative codes are signals."""
        ready_at_s, self._ready_at_s = self._ready_at_s, None
        if returncode == EXIT_OK:
            return Decision(Verdict.LEFT)
        if returncode == EXIT_BAD_CONFIG:
            return Decision(Verdict.GIVE_UP)
        if not self._was_ever_ready:
            self._failed_starts += 1
            if self._failed_starts >= self._max_failed_starts:
                return Decision(Verdict.GIVE_UP)
        if ready_at_s is not None and self._clock.now_s() - ready_at_s >= self._healthy_after_s:
            self._next_delay_s = self._first_delay_s
        delay_s = self._next_delay_s
        self._next_delay_s = min(self._max_delay_s, 2 * delay_s)
        return Decision(Verdict.RESTART, delay_s)
