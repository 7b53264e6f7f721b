from __future__ import annotations

import pytest
from opentelemetry import trace

from shell.telemetry.trace_context import (
    context_from_metadata,
    context_of,
    trace_id_of,
    trace_in,
    trace_of_call,
    traceparent_of,
)
from tests.recorded_spans import RecordedSpans

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_callers_traceparent_is_kept() -> None:
    assert trace_of_call([("user-agent", "x"), ("traceparent", TRACEPARENT)]) == (TRACEPARENT, "")


@pytest.mark.parametrize("value", ["", "nonsense", "00-" + "0" * 32 + "-b7ad6b7169203331-01", b"bytes"])
def test_a_malformed_traceparent_is_replaced_by_a_new_one(value: str | bytes) -> None:
    minted, state = trace_of_call([("traceparent", value), ("tracestate", "vendor=1")])

    assert minted != value
    assert trace_of_call([("traceparent", minted)]) == (minted, "")
    assert minted != trace_of_call(None)[0]
    assert state == ""  # it goes with the trace that it was sent with


LONGEST_STATE = f"a={'x' * 254},b={'x' * 253}"  # 512 characters


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        (["sampler=th:c;rv:d29d6a7215ced0, vendor=abc"], "sampler=th:c;rv:d29d6a7215ced0,vendor=abc"),
        (["a=1", "b=2"], "a=1,b=2"),
        ([LONGEST_STATE], LONGEST_STATE),
        ([LONGEST_STATE + "x"], ""),
        ([LONGEST_STATE, "c=1"], ""),
        (["a=1,B=2"], ""),
        (["a=1,a=2"], ""),
        (["nonsense"], ""),
        ([""], ""),
    ],
)
def test_a_callers_tracestate_is_kept_or_dropped_whole(sent: list[str], kept: str) -> None:
    metadata = [("traceparent", TRACEPARENT), *(("tracestate", each) for each in sent)]
    assert trace_of_call(metadata) == (TRACEPARENT, kept)


def test_a_current_span_tells_the_state_that_came_with_its_trace(recorded: RecordedSpans) -> None:
    context = context_from_metadata([("traceparent", TRACEPARENT), ("tracestate", "vendor=1")])
    assert trace_in() is None
    with recorded.tracer.start_as_current_span("call", context) as span:
        assert trace_in() == (traceparent_of(span.get_span_context()), "vendor=1")


def test_a_worker_reads_the_state_that_the_router_passed_on() -> None:
    span = trace.get_current_span(context_of(TRACEPARENT, "vendor=1")).get_span_context()
    assert dict(span.trace_state) == {"vendor": "1"}


def test_metadata_without_a_trace_gives_no_parent() -> None:
    with_nothing = context_from_metadata(None)
    assert not trace.get_current_span(with_nothing).get_span_context().is_valid


def test_no_parent_is_taken_from_the_present_context_for_another_trace(recorded: RecordedSpans) -> None:
    with recorded.tracer.start_as_current_span("somebody else's"):
        span = trace.get_current_span(context_of(TRACEPARENT)).get_span_context()
    assert traceparent_of(span) == TRACEPARENT


@pytest.mark.parametrize("value", [TRACEPARENT, ""])
def test_logs_take_the_id_of_the_trace(value: str) -> None:
    assert trace_id_of(value) == ("0af7651916cd43dd8448eb211c80319c" if value else "")
