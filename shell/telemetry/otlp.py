"""Whether this process exports traces or metrics by OTLP: only if OpenTelemetry's standard variables ask for it.

The variables are OTEL_*, as OpenTelemetry documents them; the SDK reads all of them itself but those that say whether
to export at all, and OTEL_PROPAGATORS, which is not followed. Without them there is no tracer, no thread and no import
of the SDK.
"""

from __future__ import annotations

import enum
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

from opentelemetry.trace import Tracer

from shell.config import environment
from shell.telemetry.logging import get_logger
from shell.telemetry.metrics import Metrics

_log = get_logger(__name__)

GRPC, HTTP = "grpc", "http/protobuf"
"""What OTEL_EXPORTER_OTLP_PROTOCOL can say here."""


class Signal(enum.StrEnum):
    """What is exported, as variables and log lines name it."""

    TRACES = "traces"
    METRICS = "metrics"


@dataclass(frozen=True, slots=True)
class OtlpExport:
    """What OpenTelemetry's variables say of exporting a signal, if they ask for it at all."""

    obstacle: str | None
    """Reason why the signal cannot be exported."""
    protocol: str
    sets_timeout: bool
    """Whether the operator gave a timeout, which replaces Tandem's own."""


def otlp_export(environ: Mapping[str, str], signal: Signal) -> OtlpExport | None:
    """None, unless an exporter or the address of a collector is named."""
    name = signal.upper()

    def given(*names: str) -> str:
        return next(filter(None, (environ.get(name, "").strip() for name in names)), "")

    exporters = {each.strip() for each in given(f"OTEL_{name}_EXPORTER").lower().split(",") if each.strip()}
    endpoint = given(f"OTEL_EXPORTER_OTLP_{name}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    if given("OTEL_SDK_DISABLED").lower() == "true" or exporters == {"none"} or not (exporters or endpoint):
        return None
    protocol = given(f"OTEL_EXPORTER_OTLP_{name}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL").lower() or GRPC
    obstacle = None
    if exporters and "otlp" not in exporters:
        obstacle = f"OTEL_{name}_EXPORTER={','.join(sorted(exporters))}; only otlp is known"
    elif protocol not in {GRPC, HTTP}:
        obstacle = f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol}; only {GRPC} and {HTTP} are known"
    sets_timeout = bool(given(f"OTEL_EXPORTER_OTLP_{name}_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"))
    return OtlpExport(obstacle, protocol, sets_timeout)


@contextmanager
def tracing(service_name: str, instance_id: str | None = None) -> Iterator[Tracer | None]:
    """The process's tracer while inside; None if nothing asks for traces. Leaving takes two seconds at most.

    OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES come before `service_name` and `instance_id`.
    """
    wanted = _possible_export(Signal.TRACES)
    if wanted is None:
        yield None
        return
    propagators = environment().get("OTEL_PROPAGATORS", "").strip()
    if propagators and "tracecontext" not in propagators.lower():
        _log.warning("OTEL_PROPAGATORS is not followed: traces are joined by W3C's trace context", got=propagators)
    # Here, so that a process that does not trace does not pay for the imports.
    from shell.telemetry.span_export import started_tracer

    with started_tracer(wanted, service_name, instance_id or _process_instance()) as tracer:
        yield tracer


@contextmanager
def exporting_metrics(metrics: Metrics, service_name: str, instance_id: str | None = None) -> Iterator[None]:
    """Exports while inside, if anything asks for it; enter it in the event loop. Names as `tracing` has them.

    Leaving takes half a second at most.
    """
    wanted = _possible_export(Signal.METRICS)
    if wanted is None:
        yield
        return
    from shell.telemetry.metric_export import started_export

    with started_export(wanted, metrics, service_name, instance_id or _process_instance()):
        yield


def _possible_export(signal: Signal) -> OtlpExport | None:
    """Returns what this process's variables ask for; None if nothing, or what cannot be: the log says so."""
    wanted = otlp_export(environment(), signal)
    if wanted is not None and wanted.obstacle is not None:
        _log.warning(f"{signal} cannot be exported", obstacle=wanted.obstacle)
        return None
    return wanted


@cache
def _process_instance() -> str:
    """Returns the `service.instance.id` of a process that has no name of its own."""
    return secrets.token_hex(8)
