"""W3C trace context: read from gRPC metadata, carried in `Group` to the workers, logged; and how a span says it failed.

Source: https://www.w3.org/TR/trace-context/, through OpenTelemetry's propagator.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from opentelemetry import trace
from opentelemetry.context import Context, get_current
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

ERROR_TYPE = "error.type"
CANCELLED = "cancelled"
TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
MAX_TRACESTATE_CHARS = 512
"""W3C asks that so much be passed on; more is dropped whole."""
Metadata = Iterable[tuple[str, str | bytes]]
_PROPAGATOR = TraceContextTextMapPropagator()


def trace_of_call(metadata: Metadata | None) -> tuple[str, str]:
    """traceparent and tracestate that a request belongs to.

    Those of the current span, as it is within a traced call; else the caller's, if they are well-formed; else a new
    traceparent, so that logs of router and workers can be joined without any tracer.
    """
    minted = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00"
    return trace_in() or trace_in(context_from_metadata(metadata)) or (minted, "")


def trace_in(context: Context | None = None) -> tuple[str, str] | None:
    """traceparent and tracestate of the span that is current in `context`, or at present; None without one."""
    span = trace.get_current_span(context).get_span_context()
    return (traceparent_of(span), span.trace_state.to_header()) if span.is_valid else None


def traceparent_of(span: trace.SpanContext) -> str:
    """Returns the name of a span for other processes."""
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"


def trace_id_of(traceparent: str) -> str:
    """Returns the trace id for logs; empty if `traceparent` is malformed."""
    parts = traceparent.split("-")
    return parts[1] if len(parts) >= 4 else ""


def sampled_trace_id_of(traceparent: str) -> str:
    """The same, of a trace that is recorded somewhere; empty of one that is not."""
    parts = traceparent.split("-")
    return parts[1] if len(parts) >= 4 and parts[3][-1:] in set("13579bdf") else ""


def context_from_metadata(metadata: Metadata | None) -> Context:
    """What the caller's spans are to be the parents of; an empty context if it sent none that is well-formed."""
    carrier: dict[str, list[str]] = {}
    for key, value in metadata or ():
        if key in {TRACEPARENT, TRACESTATE} and isinstance(value, str):
            carrier.setdefault(key, []).append(value)
    if TRACEPARENT not in carrier:
        return Context()
    if len(",".join(carrier.get(TRACESTATE, ()))) > MAX_TRACESTATE_CHARS:
        del carrier[TRACESTATE]
    return _PROPAGATOR.extract(carrier, Context())


def context_of(traceparent: str, tracestate: str = "") -> Context:
    """A context in which the named span is current; the present context, if it is so already."""
    current = trace_in()
    if current is not None and current[0] == traceparent:
        return get_current()
    return _PROPAGATOR.extract({TRACEPARENT: traceparent, TRACESTATE: tracestate}, Context())


def mark_failed(span: trace.Span, reason: str) -> None:
    """Status ERROR and `error.type`: a word of a known set, such as a `tandem.errors.Reason`, as no message is."""
    span.set_attribute(ERROR_TYPE, reason)
    span.set_status(trace.Status(trace.StatusCode.ERROR, reason))
