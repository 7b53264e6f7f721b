"""What a worker does for one request, as spans below the router's `generate`.

    prefill worker   queue → prefill ─▶ first token
                               kv.transfer ───────▶ committed      overlaps: chunks go out while others compute
    decode worker    queue → kv.receive → decode                   handed off
                     queue → prefill → decode                      computed here

A span that ends early is marked with the error, or as released where there is none: whether the
request was cancelled or had all it wanted stands in `generate`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.trace import Span, Tracer

from shell.telemetry import events
from shell.telemetry.trace_context import context_of, mark_failed
from tandem.types import GroupSpec, Role

QUEUE, PREFILL, TRANSFER, RECEIVE, DECODE = "queue", "prefill", "kv.transfer", "kv.receive", "decode"


class SequenceSpans:
    """A worker's listener for traces."""

    def __init__(self, tracer: Tracer, role: Role) -> None:
        self._tracer = tracer
        self._decodes = role.decodes

    def hear(self, event: events.WorkerEvent) -> events.SequenceListener | None:
        """Returns the listener of a sequence whose trace is recorded."""
        if not isinstance(event, events.SequenceArrived):
            return None
        spec = event.spec
        kind = _Decoded if self._decodes and not event.for_another else _Prefilled
        parent = context_of(spec.traceparent, spec.tracestate)
        queue = self._tracer.start_span(QUEUE, parent, attributes=_name_of(spec))
        return kind(self._tracer, spec, parent, queue).hear if queue.is_recording() else None


class _Spans:
    """The open spans of a request."""

    def __init__(self, tracer: Tracer, spec: GroupSpec, parent: Context, queue: Span) -> None:
        self._tracer = tracer
        self._spec = spec
        self._parent = parent
        self._open: dict[str, Span] = {QUEUE: queue}
        self._num_cached_tokens = 0

    def hear(self, event: events.SequenceEvent) -> None:
        """What both roles do."""
        match event:
            case events.PrefixLookedUp():
                self._num_cached_tokens = event.num_cached_tokens
            case events.Started():
                self._finish(QUEUE)
                self._computes(PREFILL)
            case events.SequenceEnded():
                self._ended(event)

    def _ended(self, event: events.SequenceEnded) -> None:
        for name, span in self._open.items():
            if event.error is not None:
                mark_failed(span, event.error.reason.value)
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

    def _sent(self, event: events.Transferred) -> None:
        span = self._open[TRANSFER]
        span.set_attributes({"tandem.transfer.bytes": event.num_bytes, "tandem.transfer.busy_seconds": event.seconds})
        if event.transport is not None:
            span.set_attribute("tandem.transfer.transport", event.transport)
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
    def hear(self, event: events.SequenceEvent) -> None:
        match event:
            case events.FirstToken():
                self._finish(PREFILL)
            case events.TransferStarted():
                self._begin(TRANSFER)
            case events.Transferred():
                self._sent(event)
            case _:
                super().hear(event)

    def _ended(self, event: events.SequenceEnded) -> None:
        if event.error is not None and not self._open:
            self._begin(TRANSFER)  # computed, but the hand-off failed before its first block
        super()._ended(event)


class _Decoded(_Spans):
    _reserved_ns = 0

    def hear(self, event: events.SequenceEvent) -> None:
        match event:
            case events.BlocksReserved():
                self._reserved_ns = time.time_ns()
            case events.TransferStarted() if DECODE in self._open:
                self._begin(TRANSFER)  # a move to another decode worker
            case events.TransferStarted():
                self._receive().add_event("transfer_started")
            case events.Transferred() if TRANSFER in self._open:
                self._sent(event)
            case events.Transferred():
                self._decodes_after(RECEIVE)
            case events.FirstToken():
                self._decodes_after(PREFILL)
            case events.Started() if DECODE in self._open:
                self._open[DECODE].add_event("scheduled")
            case events.Preempted():
                for span in self._open.values():
                    span.add_event("preempted")
            case _:
                super().hear(event)

    def _ended(self, event: events.SequenceEnded) -> None:
        if QUEUE in self._open and self._reserved_ns:
            self._receive()  # no writer came: it did not wait in the queue
        if DECODE in self._open:
            self._open[DECODE].set_attribute("gen_ai.usage.output_tokens", event.num_tokens)
        super()._ended(event)

    def _decodes_after(self, name: str) -> None:
        self._finish(name)
        self._computes(DECODE)

    def _receive(self) -> Span:
        self._finish(QUEUE, self._reserved_ns)
        return self._begin(RECEIVE, self._reserved_ns)


def _name_of(spec: GroupSpec) -> dict[str, str | int]:
    """The one attribute of spans that wait or move: each costs, at the start and in the export."""
    return {"tandem.request_id": spec.request_id}
