"""Whether and how this process traces: OpenTelemetry's SDK, on only if its standard variables ask for it.

The variables are OTEL_*, as OpenTelemetry documents them; the SDK reads all of them itself but those
that say whether to export at all (`trace_export`), and OTEL_PROPAGATORS, which is not
followed. Without them there is no tracer, no thread and no import of the SDK.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from opentelemetry.trace import Tracer

import tandem
from shell.config import environment
from shell.telemetry.logging import get_logger
from shell.telemetry.trace_export import TraceExport, trace_export

_log = get_logger(__name__)


@contextmanager
def tracing(service_name: str, instance_id: str | None = None) -> Iterator[Tracer | None]:
    """The process's tracer while inside; None if nothing asks for traces. Leaving takes two seconds at most.

    OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES come before `service_name` and `instance_id`.
    """
    wanted = trace_export(environment())
    if wanted.obstacle is not None:
        _log.warning("traces are asked for but cannot be exported", obstacle=wanted.obstacle)
    if wanted.foreign_propagators:
        _log.warning(
            "OTEL_PROPAGATORS is not followed: traces are joined by W3C's trace context", got=wanted.foreign_propagators
        )
    started = _start(wanted, service_name, instance_id or secrets.token_hex(8)) if wanted.possible else None
    if started is None:
        yield None
        return
    tracer, close = started
    try:
        yield tracer
    finally:
        close()


def _start(wanted: TraceExport, service_name: str, instance_id: str) -> tuple[Tracer, Callable[[], None]] | None:
    # Here, so that a process that does not trace does not pay for the imports.
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider

    from shell.telemetry.span_export import BAD_VALUES, export_spans

    ours = {"service.name": service_name, "service.instance.id": instance_id, "service.version": tandem.__version__}
    try:
        resource = Resource.create(ours).merge(OTELResourceDetector().detect())
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        close = export_spans(provider, wanted)
    except BAD_VALUES as error:
        _log.warning("traces cannot be exported", obstacle=f"bad OTEL_ variables, or a package is missing: {error}")
        return None
    _log.info("traces are exported", service=provider.resource.attributes["service.name"])
    return provider.get_tracer("tandem", tandem.__version__), close
