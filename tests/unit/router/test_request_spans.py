from __future__ import annotations

from dataclasses import replace

import pytest
from opentelemetry.trace import SpanKind

from router.request_spans import RequestSpans
from shell.telemetry.events import (
    Admitted,
    Events,
    Placed,
    PromptComputed,
    RequestBegan,
    RequestEnded,
    RequestRefused,
    TokensArrived,
    TryFailed,
)
from shell.telemetry.trace_context import traceparent_of
from tandem.errors import DeadlineExceeded, Overloaded, Reason, Unavailable
from tandem.types import (
    Constraint,
    FinishReason,
    Language,
    PlacementReason,
    PrefixAt,
    RequestId,
    Role,
    SamplingParams,
    WorkerId,
    WorkerInfo,
)
from tests.recorded_spans import RecordedSpans
from tests.registering import INFO

TRACE_ID, SPAN_ID = "a" * 32, "b" * 16
BEGAN = RequestBegan(RequestId("r1"), 7, SamplingParams(20, seed=5), 3, f"00-{TRACE_ID}-{SPAN_ID}-01")
DONE = RequestEnded(12, (FinishReason.STOP,))


def worker(name: str, role: Role) -> WorkerInfo:
    return replace(INFO, worker_id=WorkerId(name), role=role)


PREFILL, DECODE = worker("p0", Role.PREFILL), worker("d0", Role.DECODE)


class Traced:
    """A request that began."""

    def __init__(self, spans: RequestSpans, began: RequestBegan) -> None:
        self.traceparent, listener = spans.begin(began)
        self.hear = Events(*filter(None, [listener])).emit


def begin(recorded: RecordedSpans, began: RequestBegan = BEGAN) -> Traced:
    return Traced(RequestSpans(recorded.tracer, "demo"), began)


def test_without_a_tracer_the_callers_trace_is_the_workers(recorded: RecordedSpans) -> None:
    assert RequestSpans(None, "demo").begin(BEGAN) == (BEGAN.traceparent, None)


def test_a_request_is_a_span_below_the_one_that_its_call_names(recorded: RecordedSpans) -> None:
    request = begin(recorded)
    request.hear(Admitted())
    request.hear(DONE)
    span = recorded.one("generate")
    assert span.context is not None
    assert span.parent is not None
    assert f"{span.parent.trace_id:032x}" == TRACE_ID
    assert f"{span.parent.span_id:016x}" == SPAN_ID
    assert span.kind is SpanKind.INTERNAL
    assert request.traceparent == f"00-{TRACE_ID}-{span.context.span_id:016x}-01"


def test_the_current_span_is_the_parent_itself_where_it_is_the_one_named(recorded: RecordedSpans) -> None:
    with recorded.tracer.start_as_current_span("call") as call:
        context = call.get_span_context()
        begin(recorded, replace(BEGAN, traceparent=traceparent_of(context))).hear(DONE)
    parent = recorded.one("generate").parent
    assert parent is context
    assert not parent.is_remote


@pytest.mark.parametrize(("is_chat", "operation"), [(False, "text_completion"), (True, "chat")])
def test_it_says_what_was_asked_and_what_came(recorded: RecordedSpans, is_chat: bool, operation: str) -> None:
    begin(recorded, replace(BEGAN, is_chat=is_chat)).hear(DONE)
    assert recorded.attributes("generate") == {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "tandem",
        "gen_ai.request.model": "demo",
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.seed": 5,
        "gen_ai.response.id": "r1",
        "gen_ai.response.model": "demo",
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.response.finish_reasons": ("stop",),
        "tandem.request_id": "r1",
        "tandem.priority": 3,
    }
    assert recorded.failure("generate") is None


def requested(recorded: RecordedSpans, sampling: SamplingParams) -> dict[str, object]:
    """What a span says of how tokens are chosen, without the prefix that all of it has."""
    begin(recorded, replace(BEGAN, sampling=sampling)).hear(DONE)
    prefix = "gen_ai.request."
    attributes = recorded.attributes("generate")
    return {name.removeprefix(prefix): attributes[name] for name in attributes if name.startswith(prefix)}


def test_it_says_how_tokens_are_chosen(recorded: RecordedSpans) -> None:
    sampling = SamplingParams(
        9, temperature=0.5, top_k=40, top_p=0.9, presence_penalty=0.25, frequency_penalty=-0.5, seed=(1 << 63) - 1
    )
    assert requested(recorded, sampling) == {
        "model": "demo",
        "max_tokens": 9,
        "temperature": 0.5,
        "top_k": 40.0,
        "top_p": 0.9,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "seed": (1 << 63) - 1,
    }
    assert type(recorded.attributes("generate")["gen_ai.request.top_k"]) is float  # as the conventions have it


@pytest.mark.parametrize("sampling", [SamplingParams(9, seed=1 << 63), SamplingParams(9, beam_width=4)])
def test_a_seed_that_is_too_large_or_not_used_is_left_out(recorded: RecordedSpans, sampling: SamplingParams) -> None:
    assert "seed" not in requested(recorded, sampling)


def test_json_that_is_asked_for_is_told_without_its_schema(recorded: RecordedSpans) -> None:
    sampling = SamplingParams(9, constraint=Constraint(Language.JSON_SCHEMA, ('{"title": "secret"}',)))
    requested(recorded, sampling)
    assert recorded.attributes("generate")["gen_ai.output.type"] == "json"
    assert "secret" not in recorded.one("generate").to_json()


def test_cached_tokens_are_those_of_the_first_try(recorded: RecordedSpans) -> None:
    request = begin(recorded)
    request.hear(PromptComputed(0.1, 0.2, 5))
    request.hear(TokensArrived(1))
    request.hear(PromptComputed(0.3, 0.2, 7))
    request.hear(DONE)
    assert recorded.attributes("generate")["gen_ai.usage.cache_read.input_tokens"] == 5


def test_of_several_choices_it_says_how_many_and_why_each_ended(recorded: RecordedSpans) -> None:
    reasons = (FinishReason.STOP, FinishReason.LENGTH)
    begin(recorded, replace(BEGAN, num_choices=2)).hear(RequestEnded(12, reasons))
    assert recorded.attributes("generate")["gen_ai.request.choice.count"] == 2
    assert recorded.attributes("generate")["gen_ai.response.finish_reasons"] == ("stop", "length")


def test_the_wait_for_admission_is_a_span_below_it(recorded: RecordedSpans) -> None:
    request = begin(recorded)
    request.hear(Admitted())
    assert recorded.names == ["queue"]
    request.hear(DONE)
    parent, generate = recorded.one("queue").parent, recorded.one("generate").context
    assert parent is not None
    assert generate is not None
    assert parent.span_id == generate.span_id


def test_placements_moves_and_the_first_token_are_events(recorded: RecordedSpans) -> None:
    request = begin(recorded)
    request.hear(Admitted())
    request.hear(Placed(PREFILL, DECODE, PlacementReason.REMOTE_STATIC, PrefixAt.NOWHERE))
    for _ in range(3):
        request.hear(TokensArrived(1))
    request.hear(TryFailed(DECODE, Unavailable("lost", Reason.WORKER_LOST)))
    request.hear(Placed(None, DECODE, PlacementReason.LOCAL_HELD, PrefixAt.CHOSEN))
    request.hear(TokensArrived(1))
    request.hear(DONE)
    assert recorded.events("generate") == ["placed", "first_token", "moved", "placed"]
    placed, _, moved, again = recorded.one("generate").events
    assert placed.attributes == {"tandem.prefill.worker_id": "p0", "tandem.decode.worker_id": "d0"}
    assert moved.attributes == {"tandem.worker_id": "d0", "error.type": "WORKER_LOST"}
    assert again.attributes == {"tandem.decode.worker_id": "d0"}
    assert (recorded.one("generate").attributes or {})["tandem.placement.reason"] == "local_held"


@pytest.mark.parametrize(
    ("end", "failure"),
    [(RequestEnded(3, error=DeadlineExceeded("a secret prompt")), "DEADLINE_EXCEEDED"), (RequestEnded(3), "cancelled")],
)
def test_a_failure_is_an_error_with_its_reason_and_without_its_message(
    recorded: RecordedSpans, end: RequestEnded, failure: str
) -> None:
    request = begin(recorded)
    request.hear(Admitted())
    request.hear(end)
    assert (recorded.failure("generate"), recorded.failure("queue")) == (failure, None)
    assert "secret" not in recorded.one("generate").to_json()


def test_a_request_that_is_not_admitted_fails_in_the_queue(recorded: RecordedSpans) -> None:
    begin(recorded).hear(RequestEnded(0, error=Overloaded("full")))
    assert (recorded.failure("queue"), recorded.failure("generate")) == ("QUEUE_FULL", "QUEUE_FULL")


def test_a_request_that_the_caller_did_not_sample_has_no_spans_here_or_below(recorded: RecordedSpans) -> None:
    request = begin(recorded, replace(BEGAN, traceparent=f"00-{TRACE_ID}-{SPAN_ID}-00"))
    request.hear(Admitted())
    request.hear(DONE)
    assert recorded.all == ()
    assert request.traceparent.startswith(f"00-{TRACE_ID}-")
    assert request.traceparent.endswith("-00")


def test_a_refusal_marks_the_span_of_its_call(recorded: RecordedSpans) -> None:
    with recorded.tracer.start_as_current_span("call"):
        RequestSpans(recorded.tracer, "demo").hear(RequestRefused(Overloaded("full")))
    assert recorded.attributes("call") == {"tandem.error.reason": "QUEUE_FULL"}
