"""One trace per request, as the router sees it.

    (the call's span) → generate → queue                  admission
                           ├─ event placed, moved         pairs of workers, one after another
                           └─ event first_token

`generate` is the parent of what the workers do. Attributes follow OpenTelemetry's conventions
for generative AI; of prompt and completion nothing is exported but their lengths, and no stop strings.
"""

from __future__ import annotations

from opentelemetry.trace import Span, Tracer, get_current_span, set_span_in_context

from shell.telemetry import events
from shell.telemetry.gen_ai_names import CHAT, TEXT_COMPLETION, attributes_of
from shell.telemetry.trace_context import CANCELLED, context_of, mark_failed, traceparent_of
from tandem.types import Language, PlacementReason, SamplingParams

_MAX_INT64 = (1 << 63) - 1


class RequestSpans:
    """Begins the trace of each request; without a tracer, no trace."""

    def __init__(self, tracer: Tracer | None, model: str) -> None:
        self._tracer = tracer
        self._model = model

    def hear(self, event: events.RouterEvent) -> None:
        """A listener of the process: a request that was refused has no span but its call's."""
        if isinstance(event, events.RequestRefused):
            get_current_span().set_attribute("tandem.error.reason", event.error.reason.value)

    def begin(self, event: events.RequestBegan) -> tuple[str, events.RequestListener | None]:
        """Returns the trace context that is the parent of workers' spans, and the listener of the request, if any."""
        if self._tracer is None:
            return event.traceparent, None
        attributes: dict[str, str | float] = {
            "gen_ai.operation.name": CHAT if event.is_chat else TEXT_COMPLETION,
            **attributes_of(self._model),
            "gen_ai.response.id": event.request_id,
            "gen_ai.usage.input_tokens": event.num_prompt_tokens,
            **_sampling_attributes(event.sampling),
            "tandem.request_id": event.request_id,
            "tandem.priority": event.priority,
        }
        if event.num_choices > 1:
            attributes["gen_ai.request.choice.count"] = event.num_choices
        span = self._tracer.start_span("generate", context_of(event.traceparent), attributes=attributes)
        hear = _RequestSpan(self._tracer, span).hear if span.is_recording() else None
        return traceparent_of(span.get_span_context()), hear


class _RequestSpan:
    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._span = span
        self._queue: Span | None = tracer.start_span("queue", set_span_in_context(span))
        self._has_prompt = self._has_tokens = False

    def hear(self, event: events.RequestEvent) -> None:
        match event:
            case events.TokensArrived():
                if not self._has_tokens:
                    self._has_tokens = True
                    self._span.add_event("first_token")
            case events.Admitted():
                self._leave_queue()
            case events.Placed():
                self._placed(event)
            case events.PromptComputed():
                if not self._has_prompt:  # of a replay, the first try's figure stands
                    self._has_prompt = True
                    self._span.set_attribute("gen_ai.usage.cache_read.input_tokens", event.cached_tokens)
            case events.TryFailed(culprit, error):
                self._span.add_event("moved", {"tandem.worker_id": culprit.worker_id, "error.type": error.reason})
            case events.RequestEnded():
                self._ended(event)

    def _placed(self, event: events.Placed) -> None:
        workers = {"tandem.decode.worker_id": event.decode.worker_id}
        if event.prefill is not None:
            name = "source" if event.reason is PlacementReason.MOVED else "prefill"
            workers[f"tandem.{name}.worker_id"] = event.prefill.worker_id
        self._span.add_event("placed", workers)
        self._span.set_attribute("tandem.placement.reason", event.reason.value)

    def _ended(self, end: events.RequestEnded) -> None:
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
