"""When a child that ended is started again, and when there is no point. Pure.

exit 0, unasked      it left on request (Drain): not started again
exit 2               its options or its model are wrong: the whole server gives up
never ready before   gives up after `max_failed_starts` in a row
otherwise            again, after a delay that doubles up to a cap, and starts over once the
                     child has been ready for `healthy_after_s`
"""

from __future__ import annotations

from tandem.clock import Clock
from tandem.rpc.process import EXIT_BAD_CONFIG, EXIT_OK


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

    def restart_delay_s(self, returncode: int) -> float | None:
        """How long to wait before the next start of a child that ended by itself, None = never.

        Negative codes are signals.
        """
        ready_at_s, self._ready_at_s = self._ready_at_s, None
        if returncode in (EXIT_OK, EXIT_BAD_CONFIG):
            return None
        if not self._was_ever_ready:
            self._failed_starts += 1
            if self._failed_starts >= self._max_failed_starts:
                return None
        if ready_at_s is not None and self._clock.now_s() - ready_at_s >= self._healthy_after_s:
            self._next_delay_s = self._first_delay_s
        delay_s = self._next_delay_s
        self._next_delay_s = min(self._max_delay_s, 2 * delay_s)
        return delay_s
