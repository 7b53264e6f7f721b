"""`tandem status --watch`: asks, shows, waits, until ctrl-C. Outlasts a router that goes and comes back."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from cli.pool_bar import Glyphs, glyphs_for
from cli.screen import Screen, open_screen
from cli.watch_view import Moment, Rates, fit, frame, rates_between
from tandem.client import Client, ClusterStatus
from tandem.clock import Clock, MonotonicClock
from tandem.errors import DeadlineExceeded, Unavailable

_LONGEST_ANSWER_S = 5.0


class Watch:
    """What was seen so far, and how long nothing has been."""

    def __init__(self, target: str, ask: Callable[[], ClusterStatus], clock: Clock, glyphs: Glyphs) -> None:
        self._target = target
        self._ask = ask
        self._clock = clock
        self._glyphs = glyphs
        self._status: ClusterStatus | None = None
        self._rates = Rates()
        self._heard_s = clock.now_s()
        self._trouble = ""

    def look(self) -> None:
        """Asks once. Raises TandemError for what waiting does not mend, such as a wrong token."""
        try:
            status = self._ask()
        except (Unavailable, DeadlineExceeded) as error:
            self._trouble = error.message or "no answer"
            return
        self._rates = rates_between(self._status, status)
        self._status = status
        self._heard_s = self._clock.now_s()
        self._trouble = ""

    def show(self, screen: Screen, time_of_day: str) -> None:
        """What is known now."""
        width, height = screen.size()
        silent_s = self._clock.now_s() - self._heard_s if self._trouble else None
        moment = Moment(self._target, time_of_day, self._status, self._rates, silent_s, self._trouble)
        lines = frame(moment, width, self._glyphs)
        screen.show(lines if height is None else fit(lines, height))


def watch(client: Client, target: str, interval_s: float, timeout_s: float) -> int:
    """Runs until ctrl-C or SIGTERM; returns the exit code. Raises TandemError."""
    answer_s = min(timeout_s, _LONGEST_ANSWER_S)
    seen = Watch(target, lambda: client.status(timeout_s=answer_s), MonotonicClock(), glyphs_for(sys.stdout.encoding))
    try:
        with _ended_by_sigterm(), open_screen(sys.stdout) as screen:
            while True:
                seen.look()
                seen.show(screen, time.strftime("%H:%M:%S"))
                time.sleep(interval_s)
    except KeyboardInterrupt:
        return 0


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends it as ctrl-C does, so that the terminal gets back what it showed."""

    def end(signum: int, where: FrameType | None) -> None:
        del signum, where
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
