"""One span for each call that a server answers, below the caller's span if it sent a trace context.

Attributes and status follow OpenTelemetry's conventions for gRPC: a server's span is an ERROR where
the server is at fault (the six codes below), and otherwise unset, never OK; the code and
`error.type` tell the rest. So a cancelled call is no error of this span; `generate`, below it, says
"cancelled".

Source: https://opentelemetry.io/docs/specs/semconv/rpc/grpc/
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import grpc
import grpc.aio
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

from tandem.rpc.handlers import Context, Handler, behaviour_of, telling_end, with_behaviour
from tandem.telemetry.trace_context import ERROR_TYPE, context_from_metadata

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


class CallTracing(grpc.aio.ServerInterceptor):
    """Expects handlers that write their streams, as those of `CallGuard` do.

    `untraced` names services that would only be noise (probes), or one endless span (streams between processes).
    """

    def __init__(self, tracer: Tracer, untraced: frozenset[str]) -> None:
        self._tracer = tracer
        self._untraced = untraced

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Called by gRPC once per call."""
        handler = await continuation(handler_call_details)
        service, _, method = handler_call_details.method.strip("/").rpartition("/")
        if handler is None or service in self._untraced:
            return handler
        behaviour = behaviour_of(handler)
        metadata: Sequence[tuple[str, str | bytes]] = tuple(handler_call_details.invocation_metadata or ())

        async def traced(request: Any, context: Context) -> Any:
            with self._span(service, method, metadata) as span, telling_end(context, partial(_tell, span)):
                return await behaviour(request, context)

        return with_behaviour(handler, traced)

    @contextmanager
    def _span(self, service: str, method: str, metadata: Sequence[tuple[str, str | bytes]]) -> Iterator[Span]:
        with self._tracer.start_as_current_span(
            f"{service}/{method}",
            context_from_metadata(metadata),
            SpanKind.SERVER,
            {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method},
            record_exception=False,  # its message may quote the caller
            set_status_on_exception=False,
        ) as span:
            yield span


def _tell(span: Span, code: grpc.StatusCode) -> None:
    span.set_attribute("rpc.grpc.status_code", code.value[0])
    if code is not grpc.StatusCode.OK:
        span.set_attribute(ERROR_TYPE, code.name)
    if code in _FAULTS:
        span.set_status(Status(StatusCode.ERROR, code.name))
