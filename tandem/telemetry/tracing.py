"""W3C trace context, and a tracer where an exporter is configured.

The trace context travels as the text of a `traceparent` header: in gRPC metadata from the
client, in `Sequence.traceparent` to the workers. Without `OTEL_TRACES_EXPORTER` nothing is
recorded and spans cost next to nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from importlib.metadata import entry_points

from opentelemetry import context, trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tandem.errors import ConfigError

TRACEPARENT = "traceparent"
_EXPORTERS = "opentelemetry_traces_exporter"
_PROPAGATOR = TraceContextTextMapPropagator()


def configure_tracing(process_name: str, exporter_name: str) -> TracerProvider | None:
    """Installs a tracer provider; the caller shuts it down. None if `exporter_name` is empty or "none".

    `exporter_name` is an installed OpenTelemetry exporter such as `otlp`, which reads its own
    `OTEL_*` variables; spans are exported by a thread that drops what it cannot send.
    Raises ConfigError if no such exporter is installed.
    """
    if exporter_name in {"", "none"}:
        return None
    found = list(entry_points(group=_EXPORTERS, name=exporter_name))
    if not found:
        raise ConfigError("OTEL_TRACES_EXPORTER", f"no exporter named {exporter_name!r} is installed")
    provider = TracerProvider(resource=Resource.create({"service.name": process_name}))
    provider.add_span_processor(BatchSpanProcessor(found[0].load()()))
    trace.set_tracer_provider(provider)
    return provider


def context_from(traceparent: str) -> context.Context:
    """The context that `traceparent` names; an empty one if it is absent or malformed."""
    return _PROPAGATOR.extract({TRACEPARENT: traceparent})


def traceparent_of(parent: context.Context | None = None) -> str:
    """The current (or given) context as a header; empty if there is none."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, parent)
    return carrier.get(TRACEPARENT, "")


def traceparent_from_metadata(metadata: Sequence[tuple[str, str | bytes]] | None) -> str:
    """The caller's trace context from gRPC metadata, if well-formed, else a new one.

    A new one is minted so that logs of router and workers can be joined without any tracer.
    """
    for key, value in metadata or ():
        if key == TRACEPARENT and isinstance(value, str) and traceparent_of(context_from(value)):
            return value
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00"
