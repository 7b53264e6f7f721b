"""Whether this process traces: OpenTelemetry's SDK, on only if its standard variables ask for it.

The variables are OTEL_*, as OpenTelemetry documents them; the SDK reads all of them itself but those
that say whether to export at all, and OTEL_PROPAGATORS, which is not followed. Without them there is no tracer, no
thread and no import of the SDK.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from opentelemetry.trace import Tracer

from shell.config import environment
from shell.telemetry.logging import get_logger

_log = get_logger(__name__)

GRPC, HTTP = "grpc", "http/protobuf"
"""What OTEL_EXPORTER_OTLP_PROTOCOL can say here."""


@dataclass(frozen=True, slots=True)
class TraceExport:
    """What OpenTelemetry's variables say of exporting spans, if the variables ask for spans at all."""

    obstacle: str | None
    """Reason why traces cannot be exported."""
    protocol: str
    sets_timeout: bool
    """Whether the operator gave a timeout, which replaces Tandem's own."""
    sets_batch_size: bool
    foreign_propagators: str
    """OTEL_PROPAGATORS, where it leaves out W3C's trace context, the only one that is spoken."""


def trace_export(environ: Mapping[str, str]) -> TraceExport | None:
    """None, unless an exporter or the address of a collector is named."""

    def given(*names: str) -> str:
        return next(filter(None, (environ.get(name, "").strip() for name in names)), "")

    exporters = {name.strip() for name in given("OTEL_TRACES_EXPORTER").lower().split(",") if name.strip()}
    endpoint = given("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    if given("OTEL_SDK_DISABLED").lower() == "true" or exporters == {"none"} or not (exporters or endpoint):
        return None
    protocol = given("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL").lower() or GRPC
    obstacle = None
    if exporters and "otlp" not in exporters:
        obstacle = f"OTEL_TRACES_EXPORTER={','.join(sorted(exporters))}; only otlp is known"
    elif protocol not in {GRPC, HTTP}:
        obstacle = f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol}; only {GRPC} and {HTTP} are known"
    propagators = given("OTEL_PROPAGATORS")
    return TraceExport(
        obstacle,
        protocol,
        sets_timeout=bool(given("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")),
        sets_batch_size=bool(given("OTEL_BSP_MAX_EXPORT_BATCH_SIZE")),
        foreign_propagators="" if "tracecontext" in propagators.lower() else propagators,
    )


@contextmanager
def tracing(service_name: str, instance_id: str | None = None) -> Iterator[Tracer | None]:
    """The process's tracer while inside; None if nothing asks for traces. Leaving takes two seconds at most.

    OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES come before `service_name` and `instance_id`.
    """
    wanted = trace_export(environment())
    if wanted is not None and wanted.foreign_propagators:
        _log.warning(
            "OTEL_PROPAGATORS is not followed: traces are joined by W3C's trace context", got=wanted.foreign_propagators
        )
    if wanted is None or wanted.obstacle is not None:
        if wanted is not None:
            _log.warning("traces cannot be exported", obstacle=wanted.obstacle)
        yield None
        return
    # Here, so that a process that does not trace does not pay for the imports.
    from shell.telemetry.span_export import started_tracer

    with started_tracer(wanted, service_name, instance_id or secrets.token_hex(8)) as tracer:
        yield tracer
