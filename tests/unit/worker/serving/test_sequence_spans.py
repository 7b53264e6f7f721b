from __future__ import annotations

from dataclasses import replace

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from shell.telemetry.observers import SequenceObserver, StepReport, WorkerObserver
from tandem.errors import InternalError, PeerLost, TicketRefused
from tandem.types import ChoiceSpec, GroupSpec, RequestId, Role, SamplingParams, TokenId
from tests.recorded_spans import RecordedSpans
from worker.serving.spans import sequence_spans

TRACE_ID, SPAN_ID = "a" * 32, "b" * 16
SPEC = GroupSpec(
    RequestId("r1"),
    tuple(TokenId(7000 + number) for number in range(3)),
    SamplingParams(max_tokens=9),
    (ChoiceSpec(0, (TokenId(7003), TokenId(7004))),),
    traceparent=f"00-{TRACE_ID}-{SPAN_ID}-01",
)


def observer_of(recorded: RecordedSpans, role: Role) -> WorkerObserver:
    (observer,) = sequence_spans(recorded.tracer, role)
    return observer


def tell(sequence: SequenceObserver, *calls: str) -> None:
    for call in calls:
        args = (300, 0.25, "shm") if call == "transferred" else ()
        getattr(sequence, call)(*args)


def start_and_end(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


@pytest.fixture
def prefilled(recorded: RecordedSpans) -> SequenceObserver:
    return observer_of(recorded, Role.PREFILL).sequence(SPEC)


@pytest.fixture
def decoded(recorded: RecordedSpans) -> SequenceObserver:
    return observer_of(recorded, Role.DECODE).sequence(SPEC)


def test_without_a_tracer_there_is_no_observer() -> None:
    assert tuple(sequence_spans(None, Role.DECODE)) == ()


def test_a_prefill_worker_queues_computes_and_hands_over(recorded: RecordedSpans, prefilled: SequenceObserver) -> None:
    tell(prefilled, "started", "transfer_started", "first_token", "transferred")
    prefilled.ended(None, 1)
    assert recorded.names == ["queue", "prefill", "kv.transfer"]
    assert recorded.attributes("kv.transfer").items() >= {
        ("tandem.transfer.bytes", 300),
        ("tandem.transfer.busy_seconds", 0.25),
        ("tandem.transfer.transport", "shm"),
    }
    assert all(recorded.failure(name) is None for name in recorded.names)
    assert all("tandem.released" not in recorded.attributes(name) for name in recorded.names)


def test_all_spans_lie_below_the_one_that_the_router_named(
    recorded: RecordedSpans, prefilled: SequenceObserver
) -> None:
    tell(prefilled, "started", "transfer_started", "first_token", "transferred")
    prefilled.ended(None, 1)
    for span in recorded.all:
        assert span.parent is not None
        assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE_ID, SPAN_ID)


@pytest.mark.parametrize("role", Role)
def test_the_trace_state_of_the_caller_reaches_the_spans(recorded: RecordedSpans, role: Role) -> None:
    observer_of(recorded, role).sequence(replace(SPEC, tracestate="sampler=th:c,vendor=1")).ended(None, 0)
    context = recorded.one("queue").context
    assert context is not None
    assert dict(context.trace_state) == {"sampler": "th:c", "vendor": "1"}


def test_spans_tell_the_request_and_lengths_but_no_tokens(recorded: RecordedSpans, prefilled: SequenceObserver) -> None:
    prefilled.looked_up(5, 2)
    tell(prefilled, "started")
    prefilled.ended(None, 0)
    assert recorded.attributes("prefill").items() >= {
        ("tandem.request_id", "r1"),
        ("gen_ai.usage.input_tokens", 3),
        ("gen_ai.usage.cache_read.input_tokens", 2),
        ("tandem.num_resumed_tokens", 2),
    }
    for span in recorded.all:  # ids and times of spans are random: they may hold these digits
        said = [dict(span.attributes or {}), *(dict(event.attributes or {}) for event in span.events)]
        assert "700" not in str(said)


def test_a_transfer_overlaps_the_prefill_that_feeds_it(recorded: RecordedSpans, prefilled: SequenceObserver) -> None:
    tell(prefilled, "started", "transfer_started", "first_token", "transferred")
    prefilled.ended(None, 1)
    prefill, transfer = start_and_end(recorded.one("prefill")), start_and_end(recorded.one("kv.transfer"))
    assert prefill[0] <= transfer[0] <= prefill[1] <= transfer[1]


@pytest.mark.parametrize(
    ("calls", "failed"),
    [
        ((), ["queue"]),
        (("started",), ["prefill"]),
        (("started", "transfer_started"), ["kv.transfer", "prefill"]),
        (("started", "transfer_started", "first_token"), ["kv.transfer"]),
        (("started", "first_token"), ["kv.transfer"]),
    ],
)
def test_an_error_marks_what_was_under_way_on_a_prefill_worker(
    recorded: RecordedSpans, prefilled: SequenceObserver, calls: tuple[str, ...], failed: list[str]
) -> None:
    tell(prefilled, *calls)
    prefilled.ended(TicketRefused("no"), 0)
    assert sorted(name for name in recorded.names if recorded.failure(name) == "TICKET_REFUSED") == failed


def test_what_a_release_cuts_short_is_marked_as_released(recorded: RecordedSpans, prefilled: SequenceObserver) -> None:
    tell(prefilled, "started", "transfer_started")
    prefilled.ended(None, 0)
    released = [name for name in recorded.names if recorded.attributes(name).get("tandem.released")]
    assert sorted(released) == ["kv.transfer", "prefill"]
    assert all(recorded.failure(name) is None for name in recorded.names)


def test_a_prompt_whose_first_token_is_its_last_has_no_transfer(
    recorded: RecordedSpans, prefilled: SequenceObserver
) -> None:
    tell(prefilled, "started", "first_token")
    prefilled.ended(None, 1)
    assert recorded.names == ["queue", "prefill"]


def test_a_decode_worker_queues_receives_and_decodes(recorded: RecordedSpans, decoded: SequenceObserver) -> None:
    tell(decoded, "reserved", "transfer_started", "transferred", "started")
    decoded.ended(None, 8)
    assert recorded.names == ["queue", "kv.receive", "decode"]
    assert recorded.events("kv.receive") == ["transfer_started"]
    assert recorded.events("decode") == ["scheduled"]
    assert recorded.attributes("decode")["gen_ai.usage.output_tokens"] == 8
    assert start_and_end(recorded.one("queue"))[1] == start_and_end(recorded.one("kv.receive"))[0]
    assert "tandem.released" not in recorded.attributes("decode")


@pytest.mark.parametrize("error", [None, PeerLost("gone")])
def test_waiting_for_a_writer_is_no_part_of_the_queue(
    recorded: RecordedSpans, decoded: SequenceObserver, error: PeerLost | None
) -> None:
    tell(decoded, "reserved")
    decoded.ended(error, 0)
    assert recorded.names == ["queue", "kv.receive"]
    assert recorded.failure("queue") is None
    assert "tandem.released" not in recorded.attributes("queue")
    assert start_and_end(recorded.one("queue"))[1] == start_and_end(recorded.one("kv.receive"))[0]


def test_a_prompt_computed_by_the_decode_worker_queues_until_it_starts(
    recorded: RecordedSpans, decoded: SequenceObserver
) -> None:
    tell(decoded, "started", "first_token")
    decoded.ended(None, 9)
    assert recorded.names == ["queue", "prefill", "decode"]
    assert recorded.attributes("decode")["gen_ai.usage.output_tokens"] == 9


def test_a_preemption_is_an_event_of_what_it_interrupts(recorded: RecordedSpans, decoded: SequenceObserver) -> None:
    tell(decoded, "started", "preempted", "first_token", "preempted", "preempted")
    decoded.ended(None, 9)
    assert recorded.events("prefill") == ["preempted"]
    assert recorded.events("decode") == ["preempted", "preempted"]


@pytest.mark.parametrize(
    ("calls", "failed"),
    [
        ((), "queue"),
        (("reserved",), "kv.receive"),
        (("reserved", "transfer_started"), "kv.receive"),
        (("reserved", "transfer_started", "transferred"), "decode"),
        (("started",), "prefill"),
        (("started", "first_token"), "decode"),
    ],
)
def test_an_error_marks_what_was_under_way_on_a_decode_worker(
    recorded: RecordedSpans, decoded: SequenceObserver, calls: tuple[str, ...], failed: str
) -> None:
    tell(decoded, *calls)
    decoded.ended(PeerLost("gone"), 0)
    assert [name for name in recorded.names if recorded.failure(name) == "PEER_LOST"] == [failed]


def test_a_request_of_an_unsampled_trace_has_no_spans(recorded: RecordedSpans) -> None:
    observer = observer_of(recorded, Role.DECODE)
    sequence = observer.sequence(replace(SPEC, traceparent=f"00-{TRACE_ID}-{SPAN_ID}-00"))
    tell(sequence, "reserved", "transfer_started", "transferred", "started", "first_token", "preempted")
    observer.step(StepReport(0.002, 0, 1, (SPEC,)))
    sequence.ended(InternalError("x"), 1)
    assert recorded.all == ()


def test_the_spans_of_work_name_the_number_of_choices_where_there_are_several(recorded: RecordedSpans) -> None:
    observer = observer_of(recorded, Role.PREFILL)
    for spec in (SPEC, replace(SPEC, choices=tuple(map(ChoiceSpec, range(3))))):
        sequence = observer.sequence(spec)
        tell(sequence, "started", "first_token")
        sequence.ended(None, 1)
    counts = [
        (span.attributes or {}).get("gen_ai.request.choice.count") for span in recorded.all if span.name == "prefill"
    ]
    assert counts == [None, 3]
