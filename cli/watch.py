"""`tandem status --watch`: asks, shows, waits, until ctrl-C. Continues while the router restarts."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, ConsoleRenderable, Group, RenderResult
from rich.live import Live
from rich.segment import Segment

from cli.status_view import live_view, span
from cli.terminal import open_console, plain
from tandem.client import Client, ClusterStatus
from tandem.clock import Clock, MonotonicClock
from tandem.errors import DeadlineExceeded, Unavailable

_LONGEST_ANSWER_S = 5.0


class Watch:
    """The last answer, and for how long there has been none."""

    def __init__(self, target: str, ask: Callable[[], ClusterStatus], clock: Clock) -> None:
        self._target = target
        self._ask = ask
        self._clock = clock
        self._status: ClusterStatus | None = None
        self._heard_s = clock.now_s()
        self._trouble = ""

    def look(self) -> None:
        """Asks once. Raises TandemError for what waiting does not change, such as a wrong token."""
        try:
            self._status = self._ask()
        except (Unavailable, DeadlineExceeded) as error:
            self._trouble = error.message or "no answer"
            return
        self._heard_s = self._clock.now_s()
        self._trouble = ""

    def frame(self, time_of_day: str) -> Frame:
        """What is known now."""
        lines: list[ConsoleRenderable] = [plain(f"tandem {self._target}  {time_of_day}")]
        if self._trouble:
            silent = span(self._clock.now_s() - self._heard_s)
            lines.append(plain(f"unreachable for {silent}: {self._trouble}"))
        if self._status is not None:
            lines += live_view(self._status)
        return Frame(lines)


@dataclass(frozen=True, slots=True)
class Frame:
    """Lines that fit into the terminal; the last one says how many there was no room for."""

    lines: list[ConsoleRenderable]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        drawn = console.render_lines(Group(*self.lines), options.update(height=None), pad=False)
        height = options.height or len(drawn)
        if len(drawn) > height:
            drawn[height - 1 :] = [[Segment(f"({len(drawn) - height + 1} more lines)")]]
        for line in drawn:
            yield from line
            yield Segment.line()


def watch(client: Client, target: str, interval_s: float, timeout_s: float) -> int:
    """Runs until ctrl-C or SIGTERM; returns the exit code. Raises TandemError."""
    answer_s = min(timeout_s, _LONGEST_ANSWER_S)
    seen = Watch(target, lambda: client.status(timeout_s=answer_s), MonotonicClock())
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as ctrl-C: the terminal gets back what it showed
    try:
        with frames_on(open_console()) as show:
            while True:
                seen.look()
                show(seen.frame(time.strftime("%H:%M:%S")))
                time.sleep(interval_s)
    except KeyboardInterrupt:
        return 0


@contextmanager
def frames_on(console: Console) -> Iterator[Callable[[Frame], None]]:
    """On a terminal each frame replaces the last, and the old screen comes back; elsewhere one follows another."""
    if not console.is_terminal:
        yield lambda frame: console.print(frame, "", sep="")
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        yield lambda frame: live.update(frame, refresh=True)
