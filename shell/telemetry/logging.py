"""Structured logs: one event per line, key=value or JSON, on stderr (stdout belongs to `ready`).

`stderr_lines` writes them, so that no caller waits for whoever reads.

Fields carry ids and numbers, never prompts or completions. The current span's trace id is added by itself.

Exceptions are shown as where they came from and what they are, not what they say: a bug's message may quote what it
stumbled over, and that may be a prompt. Ours carry ids and numbers, the operating system's carry paths: those are
shown; others only at the debug level.
"""

from __future__ import annotations

import json
import logging
import time
import traceback
from typing import Any

from opentelemetry import trace

from shell.telemetry.stderr_lines import write_line
from tandem.errors import TandemError
from tandem.logger import Logger, get_logger

__all__ = ["WITHHELD", "Logger", "configure_logging", "exception_text", "get_logger", "printable"]

WITHHELD = "(message withheld; --log-level debug shows it)"
_MAX_DEPTH = 8
"""Causes of causes, and groups within groups."""

_QUOTING_LOGGERS = ("opentelemetry.trace.span", "opentelemetry.trace.propagation.tracecontext")
"""They quote a malformed trace context, a line for each call that brings one: whoever can call could fill the log."""


def configure_logging(process_name: str, log_format: str = "text", level: str = "info") -> None:
    """Sends all logs of this process to stderr. Called once, by a process's main."""
    handler = _LineHandler()
    formatter = _JsonFormatter if log_format == "json" else _TextFormatter
    handler.setFormatter(formatter(process_name, with_messages=level == "debug"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _QUOTING_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)


class _LineHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001  (a mistake in a call to log must not end the caller)
            line = f"a log record cannot be formatted: {record.pathname}:{record.lineno}"
        write_line(line)


class _Formatter(logging.Formatter):
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self, process_name: str, *, with_messages: bool) -> None:
        """`with_messages`: whether foreign exceptions' messages are logged."""
        super().__init__()
        self.converter = time.gmtime
        self._process_name = process_name
        self._with_messages = with_messages

    def formatException(self, ei: Any) -> str:  # noqa: N802
        error = ei[1]
        return "" if error is None else exception_text(error, with_messages=self._with_messages)


class _TextFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{key}={_shown(value)}" for key, value in _fields(record).items())
        event = printable(record.getMessage())
        line = f"{self.formatTime(record)} {record.levelname.lower()} {self._process_name} {event}"
        line = f"{line} {fields}" if fields else line
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _JsonFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "process": self._process_name,
            "logger": record.name,
            "event": record.getMessage(),
        }
        line |= _fields(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = dict(getattr(record, "fields", {}))
    span = trace.get_current_span().get_span_context()
    if span.is_valid:
        fields.setdefault("trace_id", trace.format_trace_id(span.trace_id))
    return fields


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if text and text.isprintable() and not set(text) & set(' "=') else json.dumps(text)


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


def printable(text: str) -> str:
    """`text` with escapes for what does not print: strangers choose some of it, and must not write terminal codes."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
