"""The caller's trace, sent with each call where the caller has OpenTelemetry; without it there is none to send."""

from __future__ import annotations

try:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ModuleNotFoundError:
    _propagator = None
else:
    _propagator = TraceContextTextMapPropagator()


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """gRPC metadata that makes a call part of the current trace; none outside of one."""
    carrier: dict[str, str] = {}
    if _propagator is not None:
        _propagator.inject(carrier)
    return tuple(carrier.items())
