"""Spans on their way to a collector that may be dead, slow or hang: only the exporting thread waits for it.

Spans wait in a bounded queue and the oldest are dropped; the log hears once that export fails, and why,
not once per batch. The end is the only call that takes time, and it is bounded.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from opentelemetry.exporter.otlp.proto.grpc.exporter import InvalidCompressionValueException
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Tracer

import tandem
from shell.telemetry.logging import get_logger
from shell.telemetry.tracing import HTTP, TraceExport

_log = get_logger(__name__)

EXPORT_TIMEOUT_S = 3.0
"""Timeout of a batch, retries included, unless OTEL_EXPORTER_OTLP_(TRACES_)TIMEOUT is set."""
BATCH_SPANS = 64
"""Spans encoded at a time, unless OTEL_BSP_MAX_EXPORT_BATCH_SIZE says otherwise.

Encoding holds the interpreter, and so the event loop: about 25 µs a span.
"""
FLUSH_S = 1.5
"""Given to the last spans when a process ends."""
_GIVE_UP_S = 0.5
"""Given to an export whose connection was just closed."""
_REMIND_S = 300.0
_EXPORTER_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
)
_NOISY_LOGGERS = (*_EXPORTER_LOGGERS, "opentelemetry.sdk._shared_internal", "opentelemetry.sdk.trace.export")
"""Loggers that write a line for each failed batch and each dropped span."""
_HEADERS_LOGGER = "opentelemetry.util.re"
"""Logger that quotes malformed parts of OTEL_EXPORTER_OTLP_HEADERS, which hold keys."""
_USER = re.compile(r"[^\s/@]+@")
"""Before the host of an address: a name, a password."""
_MAX_ERROR_CHARS = 300


class _SdkLog(logging.Filter):
    """Keeps the SDK's lines out of the log, and the last one on exporting for `ReportingExporter` to tell."""

    last = ""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name in _EXPORTER_LOGGERS:
            self.last = _USER.sub("", record.getMessage())[:_MAX_ERROR_CHARS]
        return False


class _Unquoted(logging.Filter):
    """Reports that a header is malformed, without the header."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = "OTEL_EXPORTER_OTLP_HEADERS: what is no name=value, URL-encoded, is left out", ()
        return True


_SDK_LOG, _UNQUOTED = _SdkLog(), _Unquoted()  # one of each, as there is one of each logger


class ReportingExporter(SpanExporter):
    """Passes spans on; logs when that begins to fail, and when it works again, at most once in five minutes."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._failing = False
        self._quiet_until_s = 0.0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Called by the exporting thread."""
        try:
            result = self._exporter.export(spans)
        except Exception as error:  # noqa: BLE001  (the SDK would catch it, and tell a logger that is hushed)
            _SDK_LOG.last = type(error).__name__  # what it says may quote the headers
            result = SpanExportResult.FAILURE
        self._note(failed=result is not SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        """Ends an export that is under way, and every later one at once. Idempotent."""
        self._failing, self._quiet_until_s = True, float("inf")  # from now on a failure is no news
        self._exporter.shutdown()

    def _note(self, *, failed: bool) -> None:
        if failed == self._failing or (failed and time.monotonic() < self._quiet_until_s):
            return
        self._failing = failed
        if failed:
            self._quiet_until_s = time.monotonic() + _REMIND_S
            _log.warning("traces cannot be exported; their spans are dropped", error=_SDK_LOG.last)
        else:
            _log.info("traces are exported again")


@contextmanager
def started_tracer(wanted: TraceExport, service_name: str, instance_id: str) -> Iterator[Tracer | None]:
    """A tracer, and the thread that exports its spans; it connects when there is something to export.

    Leaving exports what waits, within FLUSH_S; then gives it up. None where a variable makes no sense.
    """
    ours = {"service.name": service_name, "service.instance.id": instance_id, "service.version": tandem.__version__}
    try:
        resource = Resource.create(ours).merge(OTELResourceDetector().detect())
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


def _add_exporter(provider: TracerProvider, wanted: TraceExport) -> ReportingExporter:
    logging.getLogger(_HEADERS_LOGGER).addFilter(_UNQUOTED)
    exporter = ReportingExporter(_otlp_exporter(wanted.protocol, None if wanted.sets_timeout else EXPORT_TIMEOUT_S))
    batch_spans = None if wanted.sets_batch_size else BATCH_SPANS
    provider.add_span_processor(BatchSpanProcessor(exporter, max_export_batch_size=batch_spans))
    for name in _NOISY_LOGGERS:  # from now on: what they say of bad variables has been said
        logging.getLogger(name).addFilter(_SDK_LOG)
    return exporter


def _otlp_exporter(protocol: str, timeout_s: float | None) -> SpanExporter:
    if protocol == HTTP:
        try:
            from opentelemetry.exporter.otlp.proto.http import trace_exporter as over_http
        except ImportError as error:
            raise RuntimeError(
                f"OTEL_EXPORTER_OTLP_PROTOCOL={HTTP} wants the package opentelemetry-exporter-otlp-proto-http"
            ) from error
        exporter: SpanExporter = over_http.OTLPSpanExporter(timeout=timeout_s)
        return exporter
    from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as over_grpc

    return over_grpc.OTLPSpanExporter(timeout=timeout_s)
