"""Spans on their way to a collector that may be dead, slow or hang: only the exporting thread waits for it.

Spans wait in a bounded queue and the oldest are dropped. The end is the only call that takes time, and it is bounded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from opentelemetry.exporter.otlp.proto.grpc.exporter import InvalidCompressionValueException
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Tracer

import tandem
from shell.config import environment
from shell.telemetry.logging import get_logger
from shell.telemetry.otlp import HTTP, OtlpExport, Signal
from shell.telemetry.sdk_export import (
    EXPORT_TIMEOUT_S,
    ExportLog,
    hush_headers,
    hush_sdk,
    missing_http_package,
    resource_of,
)

_log = get_logger(__name__)

BATCH_SPANS = 64
"""Spans encoded at a time, unless OTEL_BSP_MAX_EXPORT_BATCH_SIZE says otherwise.

Encoding holds the interpreter, and so the event loop: about 25 µs a span.
"""
_BATCH_SIZE = "OTEL_BSP_MAX_EXPORT_BATCH_SIZE"
FLUSH_S = 1.5
"""Given to the last spans when a process ends."""
_GIVE_UP_S = 0.5
"""Given to an export whose connection was just closed."""


class ReportingExporter(SpanExporter):
    """Passes spans on, and the outcome to an `ExportLog`."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._outcome = ExportLog(Signal.TRACES)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Called by the exporting thread."""
        raised = None
        try:
            result = self._exporter.export(spans)
        except Exception as error:  # noqa: BLE001  (see `ExportLog.note`)
            result, raised = SpanExportResult.FAILURE, error
        self._outcome.note(failed=result is not SpanExportResult.SUCCESS, error=raised)
        return result

    def shutdown(self) -> None:
        """Ends an export that is under way, and every later one at once. Idempotent."""
        self._outcome.end()
        self._exporter.shutdown()


@contextmanager
def started_tracer(wanted: OtlpExport, service_name: str, instance_id: str) -> Iterator[Tracer | None]:
    """A tracer, and the thread that exports its spans; it connects when there is something to export.

    Leaving exports what waits, within FLUSH_S; then gives it up. None where a variable makes no sense.
    """
    try:
        resource = resource_of(service_name, instance_id)
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = _add_exporter(provider, wanted)
    except (ValueError, RuntimeError, InvalidCompressionValueException) as error:
        _log.warning("traces cannot be exported", obstacle=f"bad OTEL_ variables, or a package is missing: {error}")
        yield None
        return
    _log.info("traces are exported", service=resource.attributes["service.name"])
    try:
        yield provider.get_tracer("tandem", tandem.__version__)
    finally:
        # The provider's own shutdown waits for half a minute, in which a hanging collector would hold the process.
        flush = threading.Thread(target=provider.shutdown, name="span-flush", daemon=True)
        flush.start()
        flush.join(FLUSH_S)
        if flush.is_alive():
            exporter.shutdown()
            flush.join(_GIVE_UP_S)


def _add_exporter(provider: TracerProvider, wanted: OtlpExport) -> ReportingExporter:
    hush_headers()
    exporter = ReportingExporter(_otlp_exporter(wanted.protocol, None if wanted.sets_timeout else EXPORT_TIMEOUT_S))
    batch_spans = None if environment().get(_BATCH_SIZE, "").strip() else BATCH_SPANS
    provider.add_span_processor(BatchSpanProcessor(exporter, max_export_batch_size=batch_spans))
    hush_sdk()
    return exporter


def _otlp_exporter(protocol: str, timeout_s: float | None) -> SpanExporter:
    if protocol == HTTP:
        try:
            from opentelemetry.exporter.otlp.proto.http import trace_exporter as over_http
        except ImportError as error:
            raise missing_http_package() from error
        exporter: SpanExporter = over_http.OTLPSpanExporter(timeout=timeout_s)
        return exporter
    from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as over_grpc

    return over_grpc.OTLPSpanExporter(timeout=timeout_s)
