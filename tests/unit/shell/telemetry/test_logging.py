from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from shell.telemetry import logging as tandem_logging
from shell.telemetry.logging import configure_logging, get_logger
from shell.telemetry.stderr_lines import flush_lines
from shell.telemetry.trace_context import trace_of_call
from tandem.errors import PeerLost


@pytest.fixture(autouse=True)
def _loggers_are_put_back() -> Iterator[None]:
    root = logging.getLogger()
    handlers = root.handlers[:]
    loggers = [root, *map(logging.getLogger, tandem_logging._QUOTING_LOGGERS)]
    levels = [logger.level for logger in loggers]
    yield
    root.handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture
def logged(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """What was written to standard error so far; nothing was to standard output."""

    def read() -> str:
        assert flush_lines(timeout_s=10)
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err

    return read


def test_text_lines_hold_event_and_fields(logged: Callable[[], str]) -> None:
    configure_logging("router")
    get_logger("tests").info("request done", request_id="r 1", tokens=3, seconds=0.25, empty="", line="a\nb")

    captured = logged()
    assert captured.count("\n") == 1
    assert ' info router request done request_id="r 1" tokens=3 seconds=0.25 empty="" line="a\\nb"' in captured


def test_what_a_stranger_chose_writes_neither_lines_nor_terminal_codes(logged: Callable[[], str]) -> None:
    configure_logging("decode")
    chosen = "x\r\n\x1b[2K\x9b2K\u202e\ud800 é"
    try:
        raise PeerLost(chosen)
    except PeerLost:
        get_logger("tests").exception(chosen, field=chosen)
    logging.getLogger("tests").warning("refused: %s", chosen)

    lines = logged().splitlines()
    assert all(line.isprintable() for line in lines)
    assert lines[-1].endswith(r"refused: x\r\n\x1b[2K\x9b2K\u202e\ud800 é")
    assert [line for line in lines if line.startswith("x")] == []


def test_json_lines_are_json_with_the_exception_and_the_trace(logged: Callable[[], str]) -> None:
    configure_logging("decode", "json")
    with TracerProvider().get_tracer("tests").start_as_current_span("generate") as span:
        try:
            raise ValueError("bad")
        except ValueError:
            get_logger("tests").exception("step failed", request_id="r-1")

    line = json.loads(logged())
    assert (line["level"], line["process"], line["event"]) == ("error", "decode", "step failed")
    assert line["request_id"] == "r-1"
    assert line["trace_id"] == trace.format_trace_id(span.get_span_context().trace_id)
    assert "ValueError" in line["exception"]
    assert "in test_json_lines_are_json_with_the_exception_and_the_trace" in line["exception"]


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize(("level", "shown"), [("info", False), ("debug", True)])
def test_what_a_bug_says_is_withheld_but_at_the_debug_level(
    logged: Callable[[], str], log_format: str, level: str, shown: bool
) -> None:
    configure_logging("router", log_format, level)
    quoted = " ".join(("a", "prompt"))  # a traceback shows this very line
    try:
        raise KeyError(quoted)
    except KeyError:
        get_logger("tests").exception("handler failed")

    captured = logged()
    assert "KeyError" in captured
    assert (quoted in captured) == shown


def test_levels_below_the_configured_one_are_silent(logged: Callable[[], str]) -> None:
    configure_logging("router", level="warning")
    log = get_logger("tests")
    log.debug("a")
    log.info("b")
    log.warning("c")
    log.error("d")

    assert [line.split()[-1] for line in logged().splitlines()] == ["c", "d"]


def test_a_malformed_trace_context_is_no_line_of_the_log(logged: Callable[[], str]) -> None:
    configure_logging("router", level="debug")
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    trace_of_call([("traceparent", traceparent), ("tracestate", "secret")])
    trace_of_call([("traceparent", traceparent + "-" + "x" * 600)])
    assert logged() == ""
