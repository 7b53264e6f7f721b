"""`tandem status --watch`: asks, shows, waits, until ctrl-C. Continues while the router restarts."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from rich.console import Console, ConsoleOptions, ConsoleRenderable, Group, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from cli.pool_bar import Legend, PoolBar
from cli.status_view import headline, latencies, span
from cli.terminal import open_console, plain, table
from tandem.client import Client, ClusterStatus, WorkerStatus
from tandem.clock import Clock, MonotonicClock
from tandem.errors import DeadlineExceeded, Unavailable
from tandem.types import Incarnation

_LONGEST_ANSWER_S = 5.0
_ROLE_ORDER = {"prefill": 0, "decode": 1}


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second, between two answers; None = not known yet."""

    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    steps_per_s: Mapping[Incarnation, float] = field(default_factory=dict)


def rates_between(before: ClusterStatus | None, now: ClusterStatus) -> Rates:
    """From the counters of two answers; those of a router that has restarted do not compare."""
    if before is None or now.uptime_s <= before.uptime_s:
        return Rates()
    passed_s = now.uptime_s - before.uptime_s
    steps = {worker.info.incarnation: worker.load.engine_steps for worker in before.workers}
    return Rates(
        (now.recent.total_requests - before.recent.total_requests) / passed_s,
        (now.recent.total_tokens - before.recent.total_tokens) / passed_s,
        {
            worker.info.incarnation: (worker.load.engine_steps - steps[worker.info.incarnation]) / passed_s
            for worker in now.workers
            if worker.info.incarnation in steps
        },
    )


class Watch:
    """The last answer, the rates since the one before, and for how long there has been none."""

    def __init__(self, target: str, ask: Callable[[], ClusterStatus], clock: Clock) -> None:
        self._target = target
        self._ask = ask
        self._clock = clock
        self._status: ClusterStatus | None = None
        self._rates = Rates()
        self._heard_s = clock.now_s()
        self._trouble = ""

    def look(self) -> None:
        """Asks once. Raises TandemError for what waiting does not change, such as a wrong token."""
        try:
            status = self._ask()
        except (Unavailable, DeadlineExceeded) as error:
            self._trouble = error.message or "no answer"
            return
        self._rates = rates_between(self._status, status)
        self._status = status
        self._heard_s = self._clock.now_s()
        self._trouble = ""

    def frame(self, time_of_day: str) -> Frame:
        """What is known now."""
        lines: list[ConsoleRenderable] = [_spread(plain(f"tandem {self._target}"), time_of_day)]
        if self._trouble:
            silent = span(self._clock.now_s() - self._heard_s)
            lines.append(plain(f"unreachable for {silent}: {self._trouble}"))
        if self._status is not None:
            lines += _body(self._status, self._rates)
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


def _body(status: ClusterStatus, rates: Rates) -> Iterator[ConsoleRenderable]:
    yield _spread(headline(status), f"version {status.version}, up {span(status.uptime_s)}")
    yield plain(
        f"{status.active_requests} active, {status.queued_requests} queued ({status.queued_tokens} prompt tokens), "
        f"{_rate(rates.requests_per_s)} requests/s, {_rate(rates.tokens_per_s)} tokens/s"
    )
    yield from latencies(status.recent)
    yield Text()
    if not status.workers:
        yield plain("no workers")
        return
    workers = sorted(status.workers, key=lambda each: (_ROLE_ORDER.get(each.info.role, 2), each.info.worker_id))
    header = "worker state heard run wait prompt xfer preempt steps/s used pool"
    yield table(header.split(), [_row(each, rates) for each in workers])
    yield Text()
    yield Legend()


def _row(worker: WorkerStatus, rates: Rates) -> tuple[object, ...]:
    load, pool = worker.load, worker.load.pool
    used = 100 * (pool.total - pool.free) / pool.total if pool.total else 0.0
    return (
        *(worker.info.worker_id, worker.state, f"{worker.heartbeat_age_s:.1f} s"),
        *(load.running_seqs, load.waiting_seqs, load.queued_prompt_tokens, load.live_transfers, load.preemptions),
        *(_rate(rates.steps_per_s.get(worker.info.incarnation)), f"{used:.0f} %", PoolBar(pool)),
    )


def _rate(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _spread(left: Text, right: str) -> Table:
    """Both ends of a line."""
    line = Table.grid(expand=True, padding=(0, 2, 0, 0), pad_edge=False)
    line.add_column(ratio=1, no_wrap=True)
    line.add_column(justify="right", no_wrap=True)
    line.add_row(left, plain(right))
    return line


def watch(client: Client, target: str, interval_s: float, timeout_s: float) -> int:
    """Runs until ctrl-C or SIGTERM; returns the exit code. Raises TandemError."""
    answer_s = min(timeout_s, _LONGEST_ANSWER_S)
    seen = Watch(target, lambda: client.status(timeout_s=answer_s), MonotonicClock())
    try:
        with _ended_by_sigterm(), frames_on(open_console()) as show:
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
