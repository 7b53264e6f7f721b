"""W3C trace context: read from gRPC metadata, carried in `Sequence.traceparent` to the workers, logged.

Source: https://www.w3.org/TR/trace-context/, through OpenTelemetry's propagator.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

TRACEPARENT = "traceparent"
_PROPAGATOR = TraceContextTextMapPropagator()


def is_traceparent(value: str) -> bool:
    """Whether it names a trace and a span."""
    span = trace.get_current_span(_PROPAGATOR.extract({TRACEPARENT: value}))
    return span.get_span_context().is_valid


def traceparent_from_metadata(metadata: Sequence[tuple[str, str | bytes]] | None) -> str:
    """The caller's trace context from gRPC metadata, if well-formed, else a new one.

    A new one is minted so that logs of router and workers can be joined without any tracer.
    """
    for key, value in metadata or ():
        if key == TRACEPARENT and isinstance(value, str) and is_traceparent(value):
            return value
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00"
