"""One trace per request, as the router sees it.

    (the call's span) → generate → queue                  admission
                           ├─ event placed, moved         pairs of workers, one after another
                           └─ event first_token

`generate` is the parent of what the workers do. Attributes follow OpenTelemetry's conventions
for generative AI; nothing of prompt or completion but their lengths is told, nor are stop strings.
"""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.trace import Span, Tracer, get_current_span, set_span_in_context

from shell.telemetry.observers import RequestEnd, RequestObserver, RequestStart, RouterObserver
from shell.telemetry.trace_context import CANCELLED, context_of, mark_failed, traceparent_of
from tandem.errors import TandemError
from tandem.types import Language, PlacementReason, PrefixAt, SamplingParams, WorkerInfo

_MAX_INT64 = (1 << 63) - 1


def request_spans(tracer: Tracer | None, model: str) -> Sequence[RouterObserver]:
    """The router's observer for traces; none without a tracer."""
    return () if tracer is None else (_RequestSpans(tracer, model),)


class _RequestSpans(RouterObserver):
    def __init__(self, tracer: Tracer, model: str) -> None:
        self._tracer = tracer
        self._model = model

    def request(self, start: RequestStart) -> RequestObserver:
        attributes: dict[str, str | float] = {
            "gen_ai.operation.name": "chat" if start.is_chat else "text_completion",
            "gen_ai.provider.name": "tandem",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.response.id": start.request_id,
            "gen_ai.usage.input_tokens": start.num_prompt_tokens,
            **_sampling_attributes(start.sampling),
            "tandem.request_id": start.request_id,
            "tandem.priority": start.priority,
        }
        if start.num_choices > 1:
            attributes["gen_ai.request.choice.count"] = start.num_choices
        span = self._tracer.start_span("generate", context_of(start.traceparent), attributes=attributes)
        if not span.is_recording():
            return RequestObserver(traceparent_of(span.get_span_context()))
        return _RequestSpan(self._tracer, span)

    def refused(self, error: TandemError) -> None:
        get_current_span().set_attribute("tandem.error.reason", error.reason.value)  # the call's own: nothing was begun


class _RequestSpan(RequestObserver):
    def __init__(self, tracer: Tracer, span: Span) -> None:
        super().__init__(traceparent_of(span.get_span_context()))
        self._span = span
        self._queue: Span | None = tracer.start_span("queue", set_span_in_context(span))
        self._has_prompt = self._has_tokens = False

    def admitted(self) -> None:
        self._leave_queue()

    def placed(
        self, prefill: WorkerInfo | None, decode: WorkerInfo, reason: PlacementReason, prefix_at: PrefixAt
    ) -> None:
        workers = {"tandem.decode.worker_id": decode.worker_id}
        if prefill is not None:
            name = "source" if reason is PlacementReason.HANDED_OVER else "prefill"
            workers[f"tandem.{name}.worker_id"] = prefill.worker_id
        self._span.add_event("placed", workers)
        self._span.set_attribute("tandem.placement.reason", reason.value)

    def prompt_computed(self, queue_s: float, prefill_s: float, cached_tokens: int) -> None:
        if not self._has_prompt:  # of a replay, the first try's figure stands
            self._has_prompt = True
            self._span.set_attribute("gen_ai.usage.cache_read.input_tokens", cached_tokens)

    def tokens(self, num_tokens: int, index: int = 0) -> None:
        if not self._has_tokens:
            self._has_tokens = True
            self._span.add_event("first_token")

    def moved(self, culprit: WorkerInfo, error: TandemError) -> None:
        self._span.add_event("moved", {"tandem.worker_id": culprit.worker_id, "error.type": error.reason})

    def ended(self, end: RequestEnd) -> None:
        failure = None
        if end.error is not None:
            failure = end.error.reason.value
        elif not end.finish_reasons:
            failure = CANCELLED
        self._leave_queue(failure)
        self._span.set_attribute("gen_ai.usage.output_tokens", end.num_completion_tokens)
        if end.finish_reasons:
            self._span.set_attribute("gen_ai.response.finish_reasons", [each.value for each in end.finish_reasons])
        if failure is not None:
            mark_failed(self._span, failure)
        self._span.end()

    def _leave_queue(self, failure: str | None = None) -> None:
        queue, self._queue = self._queue, None
        if queue is None:
            return
        if failure is not None:
            mark_failed(queue, failure)
        queue.end()


def _sampling_attributes(sampling: SamplingParams) -> dict[str, str | float]:
    """What is in effect; left out is what changes nothing, and a seed that the conventions' int64 does not hold."""
    attributes: dict[str, str | float] = {"gen_ai.request.max_tokens": sampling.max_tokens}
    if not sampling.beam_width:
        attributes["gen_ai.request.temperature"] = sampling.temperature
        if sampling.seed <= _MAX_INT64:
            attributes["gen_ai.request.seed"] = sampling.seed
    if sampling.top_k:
        attributes["gen_ai.request.top_k"] = float(sampling.top_k)
    if sampling.top_p < 1:
        attributes["gen_ai.request.top_p"] = sampling.top_p
    if sampling.presence_penalty:
        attributes["gen_ai.request.presence_penalty"] = sampling.presence_penalty
    if sampling.frequency_penalty:
        attributes["gen_ai.request.frequency_penalty"] = sampling.frequency_penalty
    if sampling.constraint is not None and sampling.constraint.language is Language.JSON_SCHEMA:
        attributes["gen_ai.output.type"] = "json"
    return attributes
