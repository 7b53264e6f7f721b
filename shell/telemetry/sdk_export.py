"""What exporting spans and exporting metrics have in common: the process's resource, and what the log hears of it.

The log hears once that export fails, and why, not once per batch; of the SDK's own lines it hears nothing more.
"""

from __future__ import annotations

import logging
import re
import time

from opentelemetry.sdk.resources import OTELResourceDetector, Resource

import tandem
from shell.telemetry.logging import get_logger
from shell.telemetry.otlp import Signal

_log = get_logger(__name__)

EXPORT_TIMEOUT_S = 3.0
"""Timeout of a batch, retries included, unless OTEL_EXPORTER_OTLP_(…_)TIMEOUT is set."""
_REMIND_S = 300.0
_EXPORTER_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.proto.http.metric_exporter",
)
NOISY_LOGGERS = (*_EXPORTER_LOGGERS, "opentelemetry.sdk._shared_internal", "opentelemetry.sdk.trace.export")
"""Loggers that write a line for each failed batch and each dropped span."""
HEADERS_LOGGER = "opentelemetry.util.re"
"""Logger that quotes malformed parts of OTEL_EXPORTER_OTLP_HEADERS, which hold keys."""
_USER = re.compile(r"[^\s/@]+@")
"""Before the host of an address: a name, a password."""
_MAX_ERROR_CHARS = 300


class _SdkLog(logging.Filter):
    """Keeps the SDK's lines out of the log, and the last one on exporting for `ExportLog` to tell."""

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


SDK_LOG, _UNQUOTED = _SdkLog(), _Unquoted()  # one of each, as there is one of each logger


class ExportLog:
    """Logs when exporting begins to fail, and when it works again, at most once in five minutes."""

    def __init__(self, signal: Signal) -> None:
        self._signal = signal
        self._failing = False
        self._quiet_until_s = 0.0

    def note(self, *, failed: bool, error: Exception | None = None) -> None:
        """An export ended. Called by the exporting thread; `error`: what the exporter raised, which the SDK would
        catch and tell a logger that is hushed.
        """
        if failed == self._failing or (failed and time.monotonic() < self._quiet_until_s):
            return
        self._failing = failed
        if failed:
            self._quiet_until_s = time.monotonic() + _REMIND_S
            told = SDK_LOG.last if error is None else type(error).__name__  # what it says may quote the headers
            _log.warning(f"{self._signal} cannot be exported; they are dropped", error=told)
        else:
            _log.info(f"{self._signal} are exported again")

    def end(self) -> None:
        """From now on a failure is no news."""
        self._failing, self._quiet_until_s = True, float("inf")


def resource_of(service_name: str, instance_id: str) -> Resource:
    """Returns what names this process; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES come first."""
    ours = {"service.name": service_name, "service.instance.id": instance_id, "service.version": tandem.__version__}
    return Resource.create(ours).merge(OTELResourceDetector().detect())


def hush_headers() -> None:
    """From now on no header is quoted in the log."""
    logging.getLogger(HEADERS_LOGGER).addFilter(_UNQUOTED)


def hush_sdk() -> None:
    """From now on the SDK's lines stay out of the log: what it says of bad variables has been said."""
    for name in NOISY_LOGGERS:
        logging.getLogger(name).addFilter(SDK_LOG)


def missing_http_package() -> RuntimeError:
    """Returns the error for a protocol whose package is not installed."""
    return RuntimeError(
        "OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf wants the package opentelemetry-exporter-otlp-proto-http"
    )
