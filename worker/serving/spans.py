"""What a worker does for one request, as spans below the router's `generate`.

    prefill worker   queue → prefill ─▶ first token
                               kv.transfer ───────▶ committed      overlaps: chunks go out while others compute
    decode worker    queue → kv.receive → decode                   handed over
                     queue → prefill → decode                      computed here

A span that ends early is marked with the error, or as released where there is none: whether the
request was cancelled or had all it wanted is told by `generate`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.trace import Span, Tracer

from shell.telemetry.observers import SequenceObserver, WorkerObserver
from shell.telemetry.trace_context import context_of, mark_failed
from tandem.errors import TandemError
from tandem.types import GroupSpec, Role

QUEUE, PREFILL, TRANSFER, RECEIVE, DECODE = "queue", "prefill", "kv.transfer", "kv.receive", "decode"


def sequence_spans(tracer: Tracer | None, role: Role) -> Sequence[WorkerObserver]:
    """A worker's observer for traces; none without a tracer."""
    if tracer is None:
        return ()
    return (_RequestSpans(tracer, role),)


class _RequestSpans(WorkerObserver):
    def __init__(self, tracer: Tracer, role: Role) -> None:
        self._tracer = tracer
        self._decodes = role.decodes

    def sequence(self, spec: GroupSpec, *, for_another: bool = False) -> SequenceObserver:
        kind = _Decoded if self._decodes and not for_another else _Prefilled
        parent = context_of(spec.traceparent, spec.tracestate)
        queue = self._tracer.start_span(QUEUE, parent, attributes=_name_of(spec))
        return kind(self._tracer, spec, parent, queue) if queue.is_recording() else SequenceObserver()


class _Spans(SequenceObserver):
    """The open spans of one request."""

    def __init__(self, tracer: Tracer, spec: GroupSpec, parent: Context, queue: Span) -> None:
        self._tracer = tracer
        self._spec = spec
        self._parent = parent
        self._open: dict[str, Span] = {QUEUE: queue}
        self._num_cached_tokens = 0

    def looked_up(self, num_tokens: int, num_cached_tokens: int) -> None:
        self._num_cached_tokens = num_cached_tokens

    def ended(self, error: TandemError | None, num_tokens: int) -> None:
        for name, span in self._open.items():
            if error is not None:
                mark_failed(span, error.reason.value)
            elif name != DECODE:
                span.set_attribute("tandem.released", True)
            span.end()
        self._open.clear()

    def _begin(self, name: str, start_ns: int | None = None, attributes: Mapping[str, str | int] | None = None) -> Span:
        attributes = attributes or _name_of(self._spec)
        span = self._tracer.start_span(name, self._parent, attributes=attributes, start_time=start_ns)
        self._open[name] = span
        return span

    def _finish(self, name: str, end_ns: int | None = None) -> None:
        span = self._open.pop(name, None)
        if span is not None:
            span.end(end_ns)

    def _sent(self, num_bytes: int, seconds: float, transport: str | None) -> None:
        span = self._open[TRANSFER]
        span.set_attributes({"tandem.transfer.bytes": num_bytes, "tandem.transfer.busy_seconds": seconds})
        if transport is not None:
            span.set_attribute("tandem.transfer.transport", transport)
        self._finish(TRANSFER)

    def _computes(self, name: str) -> None:
        spec = self._spec
        attributes: dict[str, str | int] = {
            **_name_of(spec),
            "gen_ai.usage.input_tokens": spec.num_prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": self._num_cached_tokens,
            "tandem.num_resumed_tokens": sum(len(choice.output_token_ids) for choice in spec.choices),
        }
        if len(spec.choices) > 1:
            attributes["gen_ai.request.choice.count"] = len(spec.choices)
        self._begin(name, attributes=attributes)


class _Prefilled(_Spans):
    def started(self) -> None:
        self._finish(QUEUE)
        self._computes(PREFILL)

    def first_token(self) -> None:
        self._finish(PREFILL)

    def transfer_started(self) -> None:
        self._begin(TRANSFER)

    def transferred(self, num_bytes: int, seconds: float, transport: str | None) -> None:
        self._sent(num_bytes, seconds, transport)

    def ended(self, error: TandemError | None, num_tokens: int) -> None:
        if error is not None and not self._open:
            self._begin(TRANSFER)  # computed, but the hand-off failed before its first block
        super().ended(error, num_tokens)


class _Decoded(_Spans):
    _reserved_ns = 0

    def reserved(self) -> None:
        self._reserved_ns = time.time_ns()

    def transfer_started(self) -> None:
        if DECODE in self._open:
            self._begin(TRANSFER)  # to another decode worker
        else:
            self._receive().add_event("transfer_started")

    def transferred(self, num_bytes: int, seconds: float, transport: str | None) -> None:
        if TRANSFER in self._open:
            self._sent(num_bytes, seconds, transport)
        else:
            self._finish(RECEIVE)
            self._computes(DECODE)

    def started(self) -> None:
        if DECODE in self._open:
            self._open[DECODE].add_event("scheduled")
        else:
            self._finish(QUEUE)
            self._computes(PREFILL)

    def first_token(self) -> None:
        self._finish(PREFILL)
        self._computes(DECODE)

    def preempted(self) -> None:
        for span in self._open.values():
            span.add_event("preempted")

    def ended(self, error: TandemError | None, num_tokens: int) -> None:
        if QUEUE in self._open and self._reserved_ns:
            self._receive()  # no writer came: it did not wait in the queue
        if DECODE in self._open:
            self._open[DECODE].set_attribute("gen_ai.usage.output_tokens", num_tokens)
        super().ended(error, num_tokens)

    def _receive(self) -> Span:
        self._finish(QUEUE, self._reserved_ns)
        return self._begin(RECEIVE, self._reserved_ns)


def _name_of(spec: GroupSpec) -> dict[str, str | int]:
    """The one attribute of spans that wait or move: each costs, at the start and in the export."""
    return {"tandem.request_id": spec.request_id}
