"""`tandem status`: what one router knows of its cluster, as tables, JSON, or live; and why it is so."""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from rich.console import Console, ConsoleOptions, ConsoleRenderable, Group, RenderResult
from rich.live import Live
from rich.segment import Segment

from cli.command import Subparsers, add_command
from cli.explain_view import explain
from cli.status_view import live_view, span, view
from cli.terminal import open_console, plain, print_whole
from shell.clock import Clock, MonotonicClock
from shell.config import ClientConfig, add_arguments, load
from tandem.client import Client, ClusterStatus
from tandem.errors import ConfigError, DeadlineExceeded, Unavailable
from tandem.option_values import seconds

_WATCH_S = "1"
_LONGEST_WATCHED_ANSWER_S = 5.0


def add_parser(subparsers: Subparsers) -> None:
    """Declares the command."""
    parser = add_command(
        subparsers,
        "status",
        run,
        "As the asked router knows them from heartbeats.",
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="print JSON")
    shape.add_argument(
        "--explain", action="store_true", help="say what was chosen automatically, why, and which option forces it"
    )
    shape.add_argument(
        "--watch",
        nargs="?",
        const=_WATCH_S,
        metavar="SECONDS",
        help=f"show it live, renewed every so many seconds [{_WATCH_S}], until ctrl-C or SIGTERM",
    )
    add_arguments(parser, ClientConfig)


def run(namespace: argparse.Namespace) -> int:
    """Prints the status, once or until ctrl-C. Raises TandemError."""
    config = load(ClientConfig, namespace)
    try:
        interval_s = None if namespace.watch is None else float(seconds(0.1, 3600).parse(namespace.watch))
    except ValueError as error:
        raise ConfigError("--watch", f"{error} (got {namespace.watch!r})") from error
    with Client(config.target, security=config.security) as client:
        if interval_s is not None:
            return watch(client, config.target, interval_s, config.timeout_s)
        status = client.status(timeout_s=config.timeout_s)
    if namespace.json:
        print(json.dumps(asdict(status), ensure_ascii=False))
    else:
        print_whole(open_console(), *(explain(status) if namespace.explain else view(status)))
    return 0


class Watch:
    """The last answer, and for how long there has been none. Continues while the router restarts."""

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
    answer_s = min(timeout_s, _LONGEST_WATCHED_ANSWER_S)
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
