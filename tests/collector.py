"""A collector of traces and metrics on loopback: keeps what it is sent, or takes it and never answers.

`python -m tests.collector [--hang]` is one in a process of its own: it prints its address, and when
its input ends, how many spans came.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import ResourceMetrics
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

_STOP_S = 1.0

Value = str | int | float | bool | list[str]


@dataclass(frozen=True, slots=True)
class CollectedSpan:
    """One span as it was exported; ids in hex."""

    service: str
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: str
    status: str
    status_message: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Value]
    events: dict[str, dict[str, Value]]
    """Attributes of the last event of each name."""
    links: tuple[str, ...]
    """Ids of spans."""


@dataclass(frozen=True, slots=True)
class CollectedMetrics:
    """One export of metrics."""

    service: str
    values: dict[tuple[str, ...], float]
    """What sums and gauges stand at, by name and values of the attributes."""


class Collector(TraceServiceServicer):
    """Serves OTLP over gRPC. `answers` False: every export waits until the collector stops."""

    def __init__(self, *, answers: bool = True) -> None:
        self._answers = answers
        self._stopped = threading.Event()
        self._requests: list[ExportTraceServiceRequest] = []
        self.metrics: list[CollectedMetrics] = []
        self.called = threading.Event()
        """Set by the first export."""

    @property
    def spans(self) -> list[CollectedSpan]:
        """All that came so far."""
        return [
            _collected(group.resource.attributes, span)
            for request in list(self._requests)
            for group in request.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]

    @property
    def raw(self) -> bytes:
        """The same as it came over the wire."""
        return b"".join(request.SerializeToString() for request in list(self._requests))

    def Export(  # noqa: N802
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        """Called by exporters, in any thread."""
        self.called.set()
        if self._answers:
            self._requests.append(request)
        else:
            self._stopped.wait()
        return ExportTraceServiceResponse()

    def export_metrics(
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: grpc.ServicerContext
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        """Takes metrics, as `Export` takes spans."""
        if self._answers:
            self.metrics += map(_collected_metrics, request.resource_metrics)
        else:
            self._stopped.wait()
        return metrics_service_pb2.ExportMetricsServiceResponse()

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Its `http://HOST:PORT` while inside."""
        server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
        add_TraceServiceServicer_to_server(self, server)  # type: ignore[no-untyped-call]
        of_metrics = metrics_service_pb2_grpc.MetricsServiceServicer()
        of_metrics.Export = self.export_metrics  # type: ignore[method-assign]
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(of_metrics, server)  # type: ignore[no-untyped-call]
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            self._stopped.set()
            server.stop(_STOP_S).wait()


def _collected(resource: Iterable[KeyValue], span: Span) -> CollectedSpan:
    process = _values(resource)
    return CollectedSpan(
        service=str(process.get("service.name", "")),
        instance=str(process.get("service.instance.id", "")),
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        status=Status.StatusCode.Name(span.status.code).removeprefix("STATUS_CODE_"),
        status_message=span.status.message,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_values(span.attributes),
        events={event.name: _values(event.attributes) for event in span.events},
        links=tuple(link.span_id.hex() for link in span.links),
    )


def _collected_metrics(group: ResourceMetrics) -> CollectedMetrics:
    points = [
        (metric.name, point)
        for scope in group.scope_metrics
        for metric in scope.metrics
        for point in (*metric.sum.data_points, *metric.gauge.data_points)
    ]
    values = {
        (name, *(each.value.string_value for each in point.attributes)): point.as_double or point.as_int
        for name, point in points
    }
    return CollectedMetrics(str(_values(group.resource.attributes).get("service.name", "")), values)


def _values(pairs: Iterable[KeyValue]) -> dict[str, Value]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Value:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [each.string_value for each in value.array_value.values]
    found: Value = getattr(value, kind or "string_value")
    return found


def main() -> int:
    """Serves until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hang", action="store_true", help="never answer")
    collector = Collector(answers=not parser.parse_args().hang)
    with collector.serve() as endpoint:
        print(endpoint, flush=True)
        sys.stdin.read()
    print(len(collector.spans), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
