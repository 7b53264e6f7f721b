"""Counts every call that a handler answers, and makes a span of it, below its caller's.

The outermost interceptor, so that calls refused by the others are counted, too. A method without a handler may be
the caller's invention: it is reported as `NO_METHOD`, since methods become label values of metrics.

A span's attributes and status follow OpenTelemetry's conventions for gRPC: a server's span is an ERROR where
the server is at fault (the six codes below), and otherwise unset, never OK; the code and
`error.type` tell the rest. So a cancelled call is no error of this span; `generate`, below it, says
"cancelled". Source: https://opentelemetry.io/docs/specs/semconv/rpc/grpc/
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import grpc
import grpc.aio
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

from shell.rpc.handlers import Context, Continuation, Handler, behaviour_of, telling_end, with_behaviour
from shell.telemetry import metric_names
from shell.telemetry.metrics import Metrics, Reading
from shell.telemetry.trace_context import ERROR_TYPE, context_from_metadata, trace_in

NO_METHOD = "/none/none"
"""Reported instead of the method of a call that was refused unread."""
_FAULTS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)


class CallObserving(grpc.aio.ServerInterceptor):
    """Counts calls in metrics, and makes their spans. Expects handlers that `CallGuard` has wrapped."""

    def __init__(
        self,
        metrics: Metrics | None = None,
        tracer: Tracer | None = None,
        *,
        untraced: frozenset[str] = frozenset(),
        probes: frozenset[str] = frozenset(),
        refusals: Collection[Handler] = (),
    ) -> None:
        """`untraced` names services that would only be noise, or one endless span (streams between processes).

        `probes` are methods, by their paths, that have a span only below one of their caller's.

        `refusals`: handlers that other interceptors answer with, whatever method was asked for. They get no span.
        """
        self._counted = None if metrics is None else metrics.counter(metric_names.GRPC_CALLS)
        self._in_flight: Counter[str] = Counter()
        if metrics is not None:
            metrics.add_reader(self._read, metric_names.GRPC_IN_FLIGHT)
        self._tracer = tracer
        self._untraced = untraced
        self._probes = probes
        self._refusals = refusals

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Called by gRPC once per call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        behaviour = behaviour_of(handler)
        method = NO_METHOD if handler in self._refusals else handler_call_details.method

        async def observed(request: Any, context: Context) -> Any:
            span = self._span(method, handler_call_details)
            with span as entered, telling_end(context, lambda code: self._ended(method, code, entered)):
                self._in_flight[method] += 1
                return await behaviour(request, context)

        streams, deserializer = bool(handler.response_streaming), handler.request_deserializer
        return with_behaviour(handler, observed, streams=streams, request_deserializer=deserializer)

    def _span(self, method: str, details: grpc.HandlerCallDetails) -> AbstractContextManager[Span | None]:
        service, name = _parts(method)
        if self._tracer is None or service in self._untraced or method == NO_METHOD:
            return nullcontext()
        context = context_from_metadata(tuple(details.invocation_metadata or ()))
        if method in self._probes and trace_in(context) is None:
            return nullcontext()
        return self._tracer.start_as_current_span(
            f"{service}/{name}",
            context,
            SpanKind.SERVER,
            {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name},
            record_exception=False,  # its message may quote the caller
            set_status_on_exception=False,
        )

    def _ended(self, method: str, code: grpc.StatusCode, span: Span | None) -> None:
        self._in_flight[method] -= 1
        if self._counted is not None:
            self._counted.add(1, *_parts(method), code.name)
        if span is None:
            return
        span.set_attribute("rpc.grpc.status_code", code.value[0])
        if code is not grpc.StatusCode.OK:
            span.set_attribute(ERROR_TYPE, code.name)
        if code in _FAULTS:
            span.set_status(Status(StatusCode.ERROR, code.name))

    def _read(self) -> Iterable[Reading]:
        return [Reading(metric_names.GRPC_IN_FLIGHT, count, _parts(each)) for each, count in self._in_flight.items()]


def _parts(method: str) -> tuple[str, str]:
    """Returns service and name of `/package.Service/Method`."""
    service, _, name = method.strip("/").rpartition("/")
    return service, name
