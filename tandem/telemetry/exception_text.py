"""Exceptions as logs show them: where they came from and what they are, not what they say.

A bug's message may quote what it stumbled over, and that may be a prompt. Ours carry ids and
numbers, the operating system's carry paths: those are shown; others only at the debug level.
"""

from __future__ import annotations

import traceback

from tandem.errors import TandemError
from tandem.telemetry.printable import printable

WITHHELD = "(message withheld; --log-level debug shows it)"
_MAX_DEPTH = 8
"""Causes of causes, and groups within groups."""


def exception_text(error: BaseException, *, with_messages: bool) -> str:
    """The traceback of an exception and of those that led to it, oldest first."""
    return "\n".join(_lines(error, with_messages, _MAX_DEPTH))


def _lines(error: BaseException, with_messages: bool, depth: int) -> list[str]:
    lines: list[str] = []
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None and depth > 0:
        lines += [*_lines(before, with_messages, depth - 1), "", "which led to:"]
    lines += "".join(traceback.format_tb(error.__traceback__)).splitlines()
    shown = with_messages or isinstance(error, TandemError | OSError)
    lines.append(f"{type(error).__module__}.{type(error).__qualname__}: {printable(str(error)) if shown else WITHHELD}")
    if isinstance(error, BaseExceptionGroup) and depth > 0:
        for each in error.exceptions:
            lines += [f"  {line}" for line in _lines(each, with_messages, depth - 1)]
    return lines
