from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, TraceFlags

from tandem.telemetry import batch_spans
from tandem.telemetry.batch_spans import MAX_LINKS, DecodeBatches, PrefillBatches
from tandem.telemetry.observers import StepReport
from tandem.types import RequestId, SamplingParams, SequenceSpec, TokenId
from tests.recorded_spans import RecordedSpans


def spec(number: int) -> SequenceSpec:
    return SequenceSpec(RequestId(str(number)), (TokenId(1),), 1, SamplingParams(max_tokens=1))


def span_of(number: int) -> SpanContext:
    return SpanContext(trace_id=1, span_id=1000 + number, is_remote=False, trace_flags=TraceFlags(1))


def linked(span: ReadableSpan) -> set[int]:
    return {link.context.span_id - 1000 for link in span.links}


def step(*specs: SequenceSpec, seconds: float = 0.002) -> StepReport:
    return StepReport(seconds, 0, len(specs), specs)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The time of day in nanoseconds, to be moved by hand."""
    now = [1_000_000_000_000]
    monkeypatch.setattr(batch_spans.time, "time_ns", lambda: now[0])
    return now


def test_each_prefill_step_is_a_span_linked_to_its_prompts(recorded: RecordedSpans, clock: list[int]) -> None:
    batches = PrefillBatches(recorded.tracer)
    specs = [spec(0), spec(1), spec(2)]
    for number, each in enumerate(specs):
        batches.joined(each, span_of(number))
    batches.step(StepReport(0.5, 40, 0, specs[:2]))
    batches.step(StepReport(0.5, 8, 0, specs[1:]))
    first, second = recorded.all
    assert (first.name, linked(first), linked(second)) == ("prefill.batch", {0, 1}, {1, 2})
    assert first.attributes == {"tandem.batch.num_seqs": 2, "tandem.batch.num_tokens": 40}
    assert first.start_time == clock[0] - 500_000_000
    assert first.end_time == clock[0]


def test_a_batch_is_the_root_of_a_trace_of_its_own(recorded: RecordedSpans) -> None:
    batches = PrefillBatches(recorded.tracer)
    each = spec(0)
    batches.joined(each, span_of(0))
    with recorded.tracer.start_as_current_span("something"):
        batches.step(step(each))
    assert recorded.one("prefill.batch").parent is None


def test_prompts_that_left_are_linked_no_more(recorded: RecordedSpans) -> None:
    batches = PrefillBatches(recorded.tracer)
    each = spec(0)
    batches.joined(each, span_of(0))
    batches.left(each)
    batches.left(each)
    batches.step(step(each))
    assert recorded.all == ()


def test_equal_specs_are_told_apart(recorded: RecordedSpans) -> None:
    batches = PrefillBatches(recorded.tracer)
    one, other = spec(0), spec(0)
    assert one == other
    batches.joined(one, span_of(0))
    batches.joined(other, span_of(1))
    batches.step(step(other))
    assert linked(recorded.one("prefill.batch")) == {1}


def test_links_are_capped_and_all_sequences_counted(recorded: RecordedSpans) -> None:
    batches = PrefillBatches(recorded.tracer)
    specs = [spec(number) for number in range(MAX_LINKS + 6)]
    for number, each in enumerate(specs):
        batches.joined(each, span_of(number))
    batches.step(StepReport(0.1, 70, 0, specs))
    span = recorded.one("prefill.batch")
    assert len(span.links) == MAX_LINKS
    assert dict(span.attributes or {})["tandem.batch.num_seqs"] == MAX_LINKS + 6


def test_decode_steps_of_a_second_are_one_span(recorded: RecordedSpans, clock: list[int]) -> None:
    batches = DecodeBatches(recorded.tracer)
    specs = [spec(0), spec(1)]
    for number, each in enumerate(specs):
        batches.joined(each, span_of(number))
    began_ns = clock[0]
    for _ in range(100):
        clock[0] += 20_000_000
        batches.step(step(*specs, seconds=0.01))
    (first,) = recorded.all
    assert (first.name, linked(first)) == ("decode.batch", {0, 1})
    assert first.start_time == began_ns + 10_000_000
    assert first.end_time == began_ns + 50 * 20_000_000
    assert dict(first.attributes or {}) == {
        "tandem.batch.num_seqs": 2,
        "tandem.batch.num_tokens": 100,
        "tandem.batch.num_steps": 50,
        "tandem.batch.busy_seconds": pytest.approx(0.5),
    }


def test_a_window_ends_when_the_last_sequence_leaves(recorded: RecordedSpans, clock: list[int]) -> None:
    batches = DecodeBatches(recorded.tracer)
    one, other = spec(0), spec(1)
    batches.joined(one, span_of(0))
    batches.joined(other, span_of(1))
    batches.step(step(one, other))
    batches.left(one)
    assert recorded.all == ()
    batches.step(step(other))
    batches.left(other)
    assert linked(recorded.one("decode.batch")) == {0, 1}


def test_a_window_names_only_who_was_in_its_steps(recorded: RecordedSpans, clock: list[int]) -> None:
    batches = DecodeBatches(recorded.tracer)
    specs = [spec(number) for number in range(3)]
    for number, each in enumerate(specs):
        batches.joined(each, span_of(number))
    batches.step(step(*specs[:2]))
    clock[0] += 2_000_000_000
    batches.left(specs[0])
    batches.step(step(specs[2]))
    batches.left(specs[1])
    batches.left(specs[2])
    assert [linked(span) for span in recorded.all] == [{0, 1}, {2}]


def test_a_sequence_that_never_was_in_a_step_makes_no_window(recorded: RecordedSpans) -> None:
    batches = DecodeBatches(recorded.tracer)
    each = spec(0)
    batches.joined(each, span_of(0))
    batches.left(each)
    assert recorded.all == ()


def test_an_id_that_is_used_again_does_not_name_the_one_before(recorded: RecordedSpans, clock: list[int]) -> None:
    batches = DecodeBatches(recorded.tracer)
    stays, reused = spec(0), spec(1)
    batches.joined(stays, span_of(0))
    batches.joined(reused, span_of(1))
    batches.step(step(stays, reused))
    batches.left(reused)
    batches.joined(reused, span_of(2))  # as another object at the same address would
    clock[0] += 2_000_000_000
    batches.step(step(stays))
    batches.left(stays)
    batches.left(reused)
    assert [linked(span) for span in recorded.all] == [{0, 1}, {0}]
