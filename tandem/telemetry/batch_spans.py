"""Spans of engine steps, each linked to the spans of the sequences that were in it.

A batch belongs to no request: its span is the root of a trace of its own, and links say whom it
served. Prefill steps have one span each. Decode steps are short and alike: one span stands for
all of a window. Of an unsampled sequence nothing is known here; a batch of such alone has no span.
"""

from __future__ import annotations

import time
from typing import Protocol

from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanContext, Tracer

from tandem.telemetry.observers import StepReport
from tandem.types import SequenceSpec

MAX_LINKS = 64
"""Sequences that one span names; `tandem.batch.num_seqs` counts all."""
WINDOW_NS = 1_000_000_000
_NS_PER_S = 1_000_000_000


class BatchSpans(Protocol):
    """Told of steps, and which span a sequence is in meanwhile."""

    def joined(self, spec: SequenceSpec, span: SpanContext) -> None:
        """Steps that hold this very `spec` are to be linked to `span` from now on."""
        ...

    def left(self, spec: SequenceSpec) -> None:
        """No further step holds it. Idempotent."""
        ...

    def step(self, report: StepReport) -> None:
        """A step is over."""
        ...


class PrefillBatches:
    """`prefill.batch`: one step."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._spans: dict[int, SpanContext] = {}
        """By identity of the spec: its hash would read every token."""

    def joined(self, spec: SequenceSpec, span: SpanContext) -> None:
        """Steps of `spec` are linked to `span`."""
        self._spans[id(spec)] = span

    def left(self, spec: SequenceSpec) -> None:
        """No further step holds it."""
        self._spans.pop(id(spec), None)

    def step(self, report: StepReport) -> None:
        """One span, if any of its sequences has one."""
        links = [Link(self._spans[id(spec)]) for spec in report.specs if id(spec) in self._spans]
        if not links:
            return
        attributes = {
            "tandem.batch.num_seqs": len(report.specs),
            "tandem.batch.num_tokens": report.num_prefill_tokens,
        }
        end_ns = time.time_ns()
        start_ns = end_ns - int(report.seconds * _NS_PER_S)
        span = self._tracer.start_span(
            "prefill.batch", Context(), links=links[:MAX_LINKS], attributes=attributes, start_time=start_ns
        )
        span.end(end_ns)


class DecodeBatches:
    """`decode.batch`: the steps of a window, which ends after a second, or when nobody is left."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._spans: dict[int, SpanContext] = {}
        """By identity of the spec: its hash would read every token."""
        self._seen: set[int] = set()
        """In a step of this window, and still here. May hold sequences without a span."""
        self._gone: list[SpanContext] = []
        """In a step of this window, and left since."""
        self._began_ns = 0
        self._ended_ns = 0
        self._num_steps = 0
        self._num_tokens = 0
        self._busy_s = 0.0

    def joined(self, spec: SequenceSpec, span: SpanContext) -> None:
        """Steps of `spec` are linked to `span`."""
        self._spans[id(spec)] = span

    def left(self, spec: SequenceSpec) -> None:
        """No further step holds it."""
        span = self._spans.pop(id(spec), None)
        if span is None:
            return
        if id(spec) in self._seen:
            self._seen.discard(id(spec))  # another object may get this id
            self._gone.append(span)
        if not self._spans:
            self._close()

    def step(self, report: StepReport) -> None:
        """Adds it to the window."""
        if not self._spans:
            return
        now_ns = time.time_ns()
        if self._num_steps and now_ns - self._began_ns >= WINDOW_NS:
            self._close()
        if not self._num_steps:
            self._began_ns = now_ns - int(report.seconds * _NS_PER_S)
        self._ended_ns = now_ns
        self._num_steps += 1
        self._num_tokens += report.num_prefill_tokens + report.num_decode_seqs
        self._busy_s += report.seconds
        self._seen.update(map(id, report.specs))

    def _close(self) -> None:
        spans = [*self._gone, *(self._spans[each] for each in self._seen if each in self._spans)]
        num_seqs = len(self._gone) + len(self._seen)
        num_steps, num_tokens, busy_s = self._num_steps, self._num_tokens, self._busy_s
        self._gone, self._num_steps, self._num_tokens, self._busy_s = [], 0, 0, 0.0
        self._seen.clear()
        if not spans:
            return
        attributes = {
            "tandem.batch.num_seqs": num_seqs,
            "tandem.batch.num_tokens": num_tokens,
            "tandem.batch.num_steps": num_steps,
            "tandem.batch.busy_seconds": busy_s,
        }
        links = [Link(each) for each in spans[:MAX_LINKS]]
        span = self._tracer.start_span(
            "decode.batch", Context(), links=links, attributes=attributes, start_time=self._began_ns
        )
        span.end(self._ended_ns)
