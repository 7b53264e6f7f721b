"""Metrics on their way to a collector that may be dead, slow or hang: only the exporting thread waits for it.

    loop: timer ─ MetricPoints.read ─▶ queue ─▶ thread: exporter

A reading that is due while the one before still waits is left out: sums and histograms lose nothing by it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from queue import SimpleQueue

from opentelemetry.exporter.otlp.proto.grpc.exporter import InvalidCompressionValueException
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData

from shell.config import environment
from shell.telemetry.logging import get_logger
from shell.telemetry.metric_points import MetricPoints
from shell.telemetry.metrics import Metrics
from shell.telemetry.otlp import HTTP, OtlpExport, Signal
from shell.telemetry.sdk_export import (
    EXPORT_TIMEOUT_S,
    ExportLog,
    hush_headers,
    hush_sdk,
    missing_http_package,
    resource_of,
)
from tandem.option_values import number

_log = get_logger(__name__)

INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"
_INTERVAL_MS = "60000"
"""OpenTelemetry's default."""
LAST_S = 0.5
"""Given to the last reading when a process ends."""


@contextmanager
def started_export(wanted: OtlpExport, metrics: Metrics, service_name: str, instance_id: str) -> Iterator[None]:
    """Exports while inside. Leaving exports once more, within LAST_S. Nothing where a variable makes no sense."""
    try:
        hush_headers()
        interval_s, exporter = _interval_s(environment()), _otlp_exporter(wanted)
        points = MetricPoints(metrics, resource_of(service_name, instance_id))
    except (ValueError, RuntimeError, InvalidCompressionValueException) as error:
        _log.warning("metrics cannot be exported", obstacle=f"bad OTEL_ variables, or a package is missing: {error}")
        yield
        return
    hush_sdk()
    _log.info("metrics are exported", every_s=interval_s)
    with _Export(points, exporter, interval_s):
        yield


class _Export:
    """The timer and the thread."""

    def __init__(self, points: MetricPoints, exporter: MetricExporter, interval_s: float) -> None:
        self._points = points
        self._exporter = exporter
        self._interval_s = interval_s
        self._outcome = ExportLog(Signal.METRICS)
        self._due: SimpleQueue[MetricsData | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._export_all, name="metric-export", daemon=True)
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        self._thread.start()
        self._wait()

    def __exit__(self, *exc_info: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due.put(self._points.read())
        self._due.put(None)
        self._thread.join(LAST_S)
        if self._thread.is_alive():
            self._outcome.end()
            self._exporter.shutdown()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._fire)

    def _fire(self) -> None:
        if self._due.empty():
            self._due.put(self._points.read())
        self._wait()

    def _export_all(self) -> None:
        while (data := self._due.get()) is not None:
            raised = None
            try:
                result = self._exporter.export(data)
            except Exception as error:  # noqa: BLE001  (see `ExportLog.note`)
                result, raised = MetricExportResult.FAILURE, error
            self._outcome.note(failed=result is not MetricExportResult.SUCCESS, error=raised)


def _interval_s(environ: Mapping[str, str]) -> float:
    """Raises ValueError that names the variable."""
    try:
        interval_ms: float = number(1, 86_400_000).parse(environ.get(INTERVAL, "").strip() or _INTERVAL_MS)
    except ValueError as error:
        raise ValueError(f"{INTERVAL} {error}") from error
    return interval_ms / 1000


def _otlp_exporter(wanted: OtlpExport) -> MetricExporter:
    timeout_s = None if wanted.sets_timeout else EXPORT_TIMEOUT_S
    if wanted.protocol == HTTP:
        try:
            from opentelemetry.exporter.otlp.proto.http import metric_exporter as over_http
        except ImportError as error:
            raise missing_http_package() from error
        exporter: MetricExporter = over_http.OTLPMetricExporter(timeout=timeout_s)
        return exporter
    from opentelemetry.exporter.otlp.proto.grpc import metric_exporter as over_grpc

    return over_grpc.OTLPMetricExporter(timeout=timeout_s)
