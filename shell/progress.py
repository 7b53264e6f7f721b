"""Progress of long work, such as loading weights: reported here, shown only where a process asked for it.

Whoever does the work calls `track` or `steps` and knows no terminal; nothing is shown until `show_on_terminal` or
`show_in_log`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias, TypeVar

T = TypeVar("T")

Step: TypeAlias = Callable[[], None]
"""To be called after each step, from any thread."""


Display: TypeAlias = Callable[[str, int], AbstractContextManager[Step]]
"""Shows one piece of work, of so many steps, until its block ends."""

LOG_EVERY_S = 5.0
"""Between two lines of the log about one piece of work; shorter work has none."""


@contextmanager
def _show_nothing(what: str, total: int) -> Iterator[Step]:
    del what, total
    yield lambda: None


@contextmanager
def _show_bar(what: str, total: int) -> Iterator[Step]:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    console.show_cursor = lambda show=True: False  # type: ignore[method-assign]  # a process may end by os._exit
    with Progress(console=console, transient=True, refresh_per_second=4) as bars:
        task = bars.add_task(what, total=total)
        yield lambda: bars.advance(task)


@contextmanager
def _show_log_lines(what: str, total: int) -> Iterator[Step]:
    from shell.telemetry.logging import get_logger

    log = get_logger(__name__)
    done, due_s = 0, time.monotonic() + LOG_EVERY_S

    def step() -> None:
        nonlocal done, due_s
        done += 1
        if time.monotonic() >= due_s:
            due_s = time.monotonic() + LOG_EVERY_S
            log.info(what, done=done, of=total)

    yield step


_display: Display = _show_nothing


def show_on_terminal() -> None:
    """Bars on stderr from now on, if that is a terminal. For a process's main."""
    global _display  # noqa: PLW0603  (one for the process, as its logging is)
    if sys.stderr.isatty():
        _display = _show_bar


def show_in_log() -> None:
    """A line of the log every few seconds from now on, unless bars are shown. For a process that loads a model."""
    global _display  # noqa: PLW0603  (as above)
    if _display is _show_nothing:
        _display = _show_log_lines


def steps(what: str, total: int) -> AbstractContextManager[Step]:
    """Reports a piece of work of `total` steps."""
    return _display(what, total)


def track(items: Collection[T], what: str) -> Iterator[T]:
    """The items, each a step that ends when the next is asked for."""
    with steps(what, len(items)) as step:
        for item in items:
            yield item
            step()
