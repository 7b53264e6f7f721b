"""Exporting to collectors that live, hang or are gone; and whether the environment asks for it."""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from shell.telemetry import sdk_export, span_export
from shell.telemetry.otlp import Signal, otlp_export, tracing
from shell.telemetry.span_export import ReportingExporter
from tests.collector import Collector

CLOSE_S = 2.5
"""What `tracing` promises, and a slow machine's own time."""


@pytest.fixture(autouse=True)
def filters_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the SDK's loggers, whose own filter drops what they said a moment ago, as for another test."""
    for name in (*sdk_export.NOISY_LOGGERS, sdk_export.HEADERS_LOGGER):
        monkeypatch.setattr(logging.getLogger(name), "filters", [])
    monkeypatch.setattr(sdk_export.SDK_LOG, "last", "")


class ScriptedExporter(SpanExporter):
    def __init__(self) -> None:
        self.result = SpanExportResult.SUCCESS
        self.num_exports = 0
        self.error: Exception | None = None

    def export(self, spans: object) -> SpanExportResult:
        self.num_exports += 1
        if self.error is not None:
            raise self.error
        return self.result


SPANS: tuple[ReadableSpan, ...] = ()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("shell")]


def test_one_failing_spell_is_one_warning_and_its_end_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    inner = ScriptedExporter()
    exporter = ReportingExporter(inner)
    exporter.export(SPANS)
    inner.result = SpanExportResult.FAILURE
    for _ in range(10):
        exporter.export(SPANS)
    inner.result = SpanExportResult.SUCCESS
    for _ in range(10):
        exporter.export(SPANS)
    assert inner.num_exports == 21
    assert [line.split(";")[0] for line in lines(caplog)] == ["traces cannot be exported", "traces are exported again"]


def test_a_collector_that_comes_and_goes_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    inner = ScriptedExporter()
    exporter = ReportingExporter(inner)
    for number in range(100):
        inner.result = SpanExportResult.FAILURE if number % 2 else SpanExportResult.SUCCESS
        exporter.export(SPANS)
    assert len(lines(caplog)) == 2


def test_an_exporter_that_raises_is_told_by_kind_alone(caplog: pytest.LogCaptureFixture) -> None:
    inner = ScriptedExporter()
    inner.error = ValueError("x-api-key=secret")
    assert ReportingExporter(inner).export(SPANS) is SpanExportResult.FAILURE
    assert [record.fields for record in caplog.records] == [{"error": "ValueError"}]  # type: ignore[attr-defined]


@pytest.fixture
def endpoint_of(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")  # nothing leaves before the end, or a full batch
    return monkeypatch


def patient(endpoint_of: pytest.MonkeyPatch) -> None:
    """For a collector that answers, however busy the machine is."""
    for name in ("FLUSH_S", "EXPORT_TIMEOUT_S"):
        endpoint_of.setattr(span_export, name, 20.0)


def test_spans_that_wait_are_exported_at_the_end(endpoint_of: pytest.MonkeyPatch) -> None:
    collector = Collector()
    patient(endpoint_of)
    with collector.serve() as endpoint:
        endpoint_of.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        with tracing("tandem-router", "r0") as tracer:
            assert tracer is not None
            for number in range(200):
                tracer.start_span(f"span {number}").end()
    assert {span.name for span in collector.spans} == {f"span {number}" for number in range(200)}
    assert {(span.service, span.instance) for span in collector.spans} == {("tandem-router", "r0")}


def test_the_names_that_the_environment_gives_come_first(endpoint_of: pytest.MonkeyPatch) -> None:
    collector = Collector()
    patient(endpoint_of)
    with collector.serve() as endpoint:
        endpoint_of.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", endpoint)
        endpoint_of.setenv("OTEL_SERVICE_NAME", "mine")
        endpoint_of.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=pod-7")
        with tracing("tandem-router", "r0") as tracer:
            assert tracer is not None
            tracer.start_span("span").end()
    assert {(span.service, span.instance) for span in collector.spans} == {("mine", "pod-7")}


def time_to_close(num_spans: int) -> float:
    with tracing("tandem-router") as tracer:
        assert tracer is not None
        for _ in range(num_spans):
            tracer.start_span("span").end()
        began_s = time.monotonic()
    return time.monotonic() - began_s


def closes_in_time() -> bool:
    """A machine that stands still makes one measurement longer; what waits for a collector makes all."""
    return any(time_to_close(300) < CLOSE_S for _ in range(3))


def test_a_hanging_collector_does_not_hold_the_end(endpoint_of: pytest.MonkeyPatch) -> None:
    collector = Collector(answers=False)
    with collector.serve() as endpoint:
        endpoint_of.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        assert closes_in_time()
        assert collector.called.is_set()


@pytest.mark.parametrize(
    ("listens", "protocol"),
    [(False, "grpc"), (True, "grpc"), (True, "http/protobuf")],
    ids=["absent", "mute", "mute http"],
)
def test_a_port_that_does_not_answer_does_not_hold_the_end(
    endpoint_of: pytest.MonkeyPatch, listens: bool, protocol: str
) -> None:
    if protocol != "grpc":
        pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        if listens:
            mute.listen()
        endpoint_of.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
        endpoint_of.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{mute.getsockname()[1]}")
        assert closes_in_time()


def test_making_spans_does_not_wait_while_a_collector_hangs(
    endpoint_of: pytest.MonkeyPatch,
) -> None:
    collector = Collector(answers=False)
    with collector.serve() as endpoint:
        endpoint_of.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        endpoint_of.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "128")
        with tracing("tandem-router") as tracer:
            assert tracer is not None
            slowest_s = 0.0
            for _ in range(2000):
                began_s = time.perf_counter()
                tracer.start_span("span").end()
                slowest_s = max(slowest_s, time.perf_counter() - began_s)
            assert collector.called.wait(30)
    assert slowest_s < span_export.EXPORT_TIMEOUT_S / 2


class RefusingCollector(Collector):
    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self.called.set()
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "missing api key " + "x" * 1000)


def test_the_log_says_once_why_a_collector_refuses(
    endpoint_of: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    collector = RefusingCollector()
    with collector.serve() as endpoint:
        endpoint_of.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        endpoint_of.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-api-key=secret")
        with tracing("tandem-router") as tracer:
            assert tracer is not None
            for _ in range(300):
                tracer.start_span("span").end()
            assert collector.called.wait(30)
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    error = warning.fields["error"]  # type: ignore[attr-defined]
    assert "UNAUTHENTICATED" in error
    assert "missing api key" in error
    assert len(error) <= 300
    assert "secret" not in caplog.text


def test_no_password_of_an_address_is_kept() -> None:
    said = {"name": sdk_export._EXPORTER_LOGGERS[0], "msg": "failed: %s", "args": ("me:secret@collector:4317",)}
    assert not sdk_export.SDK_LOG.filter(logging.makeLogRecord(said))
    assert sdk_export.SDK_LOG.last == "failed: collector:4317"


@pytest.mark.parametrize(
    ("variable", "value"), [("OTEL_EXPORTER_OTLP_HEADERS", "api key=secret"), ("OTEL_BSP_MAX_QUEUE_SIZE", "many")]
)
def test_a_variable_that_the_sdk_cannot_read_is_told_but_not_quoted(
    endpoint_of: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str, value: str
) -> None:
    endpoint_of.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    endpoint_of.setenv(variable, value)
    with tracing("tandem-router") as tracer:
        assert tracer is not None
    assert variable in caplog.text
    assert "secret" not in caplog.text


def test_a_bad_value_of_the_sdks_own_is_told_and_the_process_goes_on(
    endpoint_of: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint_of.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    endpoint_of.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "zip")
    with tracing("tandem-router") as tracer:
        assert tracer is None
    assert lines(caplog) == ["traces cannot be exported"]


@pytest.fixture
def http_endpoint() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """A collector that speaks HTTP, and what was posted to it: path and body."""
    posted: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", posted
        server.shutdown()
        thread.join()


def test_spans_go_by_http_where_the_protocol_says_so(
    endpoint_of: pytest.MonkeyPatch, http_endpoint: tuple[str, list[tuple[str, bytes]]]
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    endpoint, posted = http_endpoint
    endpoint_of.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    endpoint_of.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    with tracing("tandem-router", "r0") as tracer:
        assert tracer is not None
        tracer.start_span("span").end()
    ((path, body),) = posted
    (group,) = ExportTraceServiceRequest.FromString(body).resource_spans
    assert (path, [span.name for span in group.scope_spans[0].spans]) == ("/v1/traces", ["span"])


def test_without_the_package_for_http_the_log_names_it(
    endpoint_of: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint_of.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)  # importing it raises
    endpoint_of.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    endpoint_of.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    with tracing("tandem-router") as tracer:
        assert tracer is None
    (warning,) = [record for record in caplog.records if record.name.startswith("shell")]
    assert "opentelemetry-exporter-otlp-proto-http" in warning.fields["obstacle"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("propagators", "num_warnings"), [("", 0), ("tracecontext,baggage", 0), ("b3", 1), ("none", 1)]
)
def test_propagators_that_are_not_spoken_are_told(
    endpoint_of: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, propagators: str, num_warnings: int
) -> None:
    endpoint_of.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    endpoint_of.setenv("OTEL_PROPAGATORS", propagators)
    with tracing("tandem-router") as tracer:
        assert tracer is not None
    assert len([line for line in lines(caplog) if "OTEL_PROPAGATORS" in line]) == num_warnings


def test_without_variables_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_EXPORTER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)  # importing it would raise
    with tracing("tandem-router") as tracer:
        assert tracer is None


ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}


@pytest.mark.parametrize(
    ("environ", "possible"),
    [
        ({}, False),
        (ENDPOINT, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4317"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "OTLP"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp,console"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, False),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"}, False),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": "None"}, False),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": ""}, True),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "true"}, False),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "TRUE"}, False),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "false"}, True),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, True),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "GRPC"}, True),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, True),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"}, False),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, False),
    ],
)
def test_the_standard_variables_decide_whether_to_export(environ: dict[str, str], possible: bool) -> None:
    wanted = otlp_export(environ, Signal.TRACES)
    assert (wanted is not None and wanted.obstacle is None) is possible
    if wanted is not None and wanted.obstacle is not None:
        assert list(environ.values())[-1] in wanted.obstacle
