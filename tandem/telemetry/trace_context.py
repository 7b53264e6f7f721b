"""W3C trace context: read from gRPC metadata, carried in `Group` to the workers, logged.

Source: https://www.w3.org/TR/trace-context/, through OpenTelemetry's propagator.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

from opentelemetry import trace
from opentelemetry.context import Context, get_current
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
MAX_TRACESTATE_CHARS = 512
"""W3C asks that so much be passed on; more is dropped whole."""
_KEYS = frozenset({TRACEPARENT, TRACESTATE})
Metadata = Sequence[tuple[str, str | bytes]]
_PROPAGATOR = TraceContextTextMapPropagator()


def trace_from_metadata(metadata: Metadata | None) -> tuple[str, str]:
    """The caller's traceparent and tracestate from gRPC metadata, if well-formed, else a new one and none.

    A new one is minted so that logs of router and workers can be joined without any tracer.
    """
    span = _named(context_from_metadata(metadata))
    if span.is_valid:
        return traceparent_of(span), span.trace_state.to_header()
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00", ""


def trace_of_call(metadata: Iterable[tuple[str, str | bytes]] | None) -> tuple[str, str]:
    """traceparent and tracestate that a request belongs to: of the current span, else as `trace_from_metadata`."""
    return current_trace() or trace_from_metadata(tuple(metadata or ()))


def current_trace() -> tuple[str, str] | None:
    """traceparent and tracestate of the span that is current, as it is within a traced call; None without a tracer."""
    span = trace.get_current_span().get_span_context()
    return (traceparent_of(span), span.trace_state.to_header()) if span.is_valid else None


def current_traceparent() -> str | None:
    """Names the span that is current, as it is within a traced call; None without a tracer."""
    span = trace.get_current_span().get_span_context()
    return traceparent_of(span) if span.is_valid else None


def traceparent_of(span: trace.SpanContext) -> str:
    """How a span is named to others."""
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"


def trace_id_of(traceparent: str) -> str:
    """The trace's part of it, for logs; empty if it is none."""
    parts = traceparent.split("-")
    return parts[1] if len(parts) >= 4 else ""


def context_from_metadata(metadata: Metadata | None) -> Context:
    """What the caller's spans are to be the parents of; an empty context if it sent none that is well-formed."""
    carrier: dict[str, list[str]] = {}
    for key, value in metadata or ():
        if key in _KEYS and isinstance(value, str):
            carrier.setdefault(key, []).append(value)
    if TRACEPARENT not in carrier:
        return Context()
    if TRACESTATE in carrier and len(",".join(carrier[TRACESTATE])) > MAX_TRACESTATE_CHARS:
        del carrier[TRACESTATE]
    return _PROPAGATOR.extract(carrier, Context())


def context_of(traceparent: str, tracestate: str = "") -> Context:
    """A context in which the named span is current; the present context, if it is so already."""
    if traceparent == current_traceparent():
        return get_current()
    carrier = {TRACEPARENT: traceparent, TRACESTATE: tracestate} if tracestate else {TRACEPARENT: traceparent}
    return _PROPAGATOR.extract(carrier, Context())


def _named(context: Context) -> trace.SpanContext:
    return trace.get_current_span(context).get_span_context()
