from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from shell.telemetry.events import (
    BlocksReserved,
    FirstToken,
    Preempted,
    PrefixLookedUp,
    ProcessEvents,
    SequenceArrived,
    SequenceEnded,
    SequenceEvent,
    SequenceEvents,
    Started,
    Transferred,
    TransferStarted,
    WorkerEvents,
)
from tandem.errors import InternalError, PeerLost, TicketRefused
from tandem.types import ChoiceSpec, GroupSpec, RequestId, Role, SamplingParams, TokenId
from tests.recorded_spans import RecordedSpans
from worker.serving.spans import SequenceSpans

TRACE_ID, SPAN_ID = "a" * 32, "b" * 16
SPEC = GroupSpec(
    RequestId("r1"),
    tuple(TokenId(7000 + number) for number in range(3)),
    SamplingParams(max_tokens=9),
    (ChoiceSpec(0, (TokenId(7003), TokenId(7004))),),
    traceparent=f"00-{TRACE_ID}-{SPAN_ID}-01",
)


def events_of(recorded: RecordedSpans, role: Role, spec: GroupSpec = SPEC) -> SequenceEvents:
    events: WorkerEvents = ProcessEvents(SequenceSpans(recorded.tracer, role).hear)
    return events.begin(SequenceArrived(spec))


def emit(sequence: SequenceEvents, *kinds: Callable[[], SequenceEvent]) -> None:
    for kind in kinds:
        sequence.emit(kind())


def transferred() -> Transferred:
    return Transferred(300, 0.25, "shm")


def start_and_end(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


@pytest.fixture
def prefilled(recorded: RecordedSpans) -> SequenceEvents:
    return events_of(recorded, Role.PREFILL)


@pytest.fixture
def decoded(recorded: RecordedSpans) -> SequenceEvents:
    return events_of(recorded, Role.DECODE)


def test_a_prefill_worker_queues_computes_and_hands_over(recorded: RecordedSpans, prefilled: SequenceEvents) -> None:
    emit(prefilled, Started, TransferStarted, FirstToken, transferred)
    prefilled.emit(SequenceEnded(None, 1))
    assert recorded.names == ["queue", "prefill", "kv.transfer"]
    assert recorded.attributes("kv.transfer").items() >= {
        ("tandem.transfer.bytes", 300),
        ("tandem.transfer.busy_seconds", 0.25),
        ("tandem.transfer.transport", "shm"),
    }
    assert all(recorded.failure(name) is None for name in recorded.names)
    assert all("tandem.released" not in recorded.attributes(name) for name in recorded.names)


def test_all_spans_lie_below_the_one_that_the_router_named(recorded: RecordedSpans, prefilled: SequenceEvents) -> None:
    emit(prefilled, Started, TransferStarted, FirstToken, transferred)
    prefilled.emit(SequenceEnded(None, 1))
    for span in recorded.all:
        assert span.parent is not None
        assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE_ID, SPAN_ID)


@pytest.mark.parametrize("role", Role)
def test_the_trace_state_of_the_caller_reaches_the_spans(recorded: RecordedSpans, role: Role) -> None:
    events_of(recorded, role, replace(SPEC, tracestate="sampler=th:c,vendor=1")).emit(SequenceEnded(None, 0))
    context = recorded.one("queue").context
    assert context is not None
    assert dict(context.trace_state) == {"sampler": "th:c", "vendor": "1"}


def test_spans_tell_the_request_and_lengths_but_no_tokens(recorded: RecordedSpans, prefilled: SequenceEvents) -> None:
    prefilled.emit(PrefixLookedUp(5, 2))
    emit(prefilled, Started)
    prefilled.emit(SequenceEnded(None, 0))
    assert recorded.attributes("prefill").items() >= {
        ("tandem.request_id", "r1"),
        ("gen_ai.usage.input_tokens", 3),
        ("gen_ai.usage.cache_read.input_tokens", 2),
        ("tandem.num_resumed_tokens", 2),
    }
    for span in recorded.all:  # ids and times of spans are random: they may hold these digits
        said = [dict(span.attributes or {}), *(dict(event.attributes or {}) for event in span.events)]
        assert "700" not in str(said)


def test_a_transfer_overlaps_the_prefill_that_feeds_it(recorded: RecordedSpans, prefilled: SequenceEvents) -> None:
    emit(prefilled, Started, TransferStarted, FirstToken, transferred)
    prefilled.emit(SequenceEnded(None, 1))
    prefill, transfer = start_and_end(recorded.one("prefill")), start_and_end(recorded.one("kv.transfer"))
    assert prefill[0] <= transfer[0] <= prefill[1] <= transfer[1]


@pytest.mark.parametrize(
    ("kinds", "failed"),
    [
        ((), ["queue"]),
        ((Started,), ["prefill"]),
        ((Started, TransferStarted), ["kv.transfer", "prefill"]),
        ((Started, TransferStarted, FirstToken), ["kv.transfer"]),
        ((Started, FirstToken), ["kv.transfer"]),
    ],
)
def test_an_error_marks_what_was_under_way_on_a_prefill_worker(
    recorded: RecordedSpans, prefilled: SequenceEvents, kinds: tuple[type[SequenceEvent], ...], failed: list[str]
) -> None:
    emit(prefilled, *kinds)
    prefilled.emit(SequenceEnded(TicketRefused("no"), 0))
    assert sorted(name for name in recorded.names if recorded.failure(name) == "TICKET_REFUSED") == failed


def test_what_a_release_cuts_short_is_marked_as_released(recorded: RecordedSpans, prefilled: SequenceEvents) -> None:
    emit(prefilled, Started, TransferStarted)
    prefilled.emit(SequenceEnded(None, 0))
    released = [name for name in recorded.names if recorded.attributes(name).get("tandem.released")]
    assert sorted(released) == ["kv.transfer", "prefill"]
    assert all(recorded.failure(name) is None for name in recorded.names)


def test_a_prompt_whose_first_token_is_its_last_has_no_transfer(
    recorded: RecordedSpans, prefilled: SequenceEvents
) -> None:
    emit(prefilled, Started, FirstToken)
    prefilled.emit(SequenceEnded(None, 1))
    assert recorded.names == ["queue", "prefill"]


def test_a_decode_worker_queues_receives_and_decodes(recorded: RecordedSpans, decoded: SequenceEvents) -> None:
    emit(decoded, BlocksReserved, TransferStarted, transferred, Started)
    decoded.emit(SequenceEnded(None, 8))
    assert recorded.names == ["queue", "kv.receive", "decode"]
    assert recorded.events("kv.receive") == ["transfer_started"]
    assert recorded.events("decode") == ["scheduled"]
    assert recorded.attributes("decode")["gen_ai.usage.output_tokens"] == 8
    assert start_and_end(recorded.one("queue"))[1] == start_and_end(recorded.one("kv.receive"))[0]
    assert "tandem.released" not in recorded.attributes("decode")


@pytest.mark.parametrize("error", [None, PeerLost("gone")])
def test_waiting_for_a_writer_is_no_part_of_the_queue(
    recorded: RecordedSpans, decoded: SequenceEvents, error: PeerLost | None
) -> None:
    emit(decoded, BlocksReserved)
    decoded.emit(SequenceEnded(error, 0))
    assert recorded.names == ["queue", "kv.receive"]
    assert recorded.failure("queue") is None
    assert "tandem.released" not in recorded.attributes("queue")
    assert start_and_end(recorded.one("queue"))[1] == start_and_end(recorded.one("kv.receive"))[0]


def test_a_prompt_computed_by_the_decode_worker_queues_until_it_starts(
    recorded: RecordedSpans, decoded: SequenceEvents
) -> None:
    emit(decoded, Started, FirstToken)
    decoded.emit(SequenceEnded(None, 9))
    assert recorded.names == ["queue", "prefill", "decode"]
    assert recorded.attributes("decode")["gen_ai.usage.output_tokens"] == 9


def test_a_preemption_is_an_event_of_what_it_interrupts(recorded: RecordedSpans, decoded: SequenceEvents) -> None:
    emit(decoded, Started, Preempted, FirstToken, Preempted, Preempted)
    decoded.emit(SequenceEnded(None, 9))
    assert recorded.events("prefill") == ["preempted"]
    assert recorded.events("decode") == ["preempted", "preempted"]


@pytest.mark.parametrize(
    ("kinds", "failed"),
    [
        ((), "queue"),
        ((BlocksReserved,), "kv.receive"),
        ((BlocksReserved, TransferStarted), "kv.receive"),
        ((BlocksReserved, TransferStarted, transferred), "decode"),
        ((Started,), "prefill"),
        ((Started, FirstToken), "decode"),
    ],
)
def test_an_error_marks_what_was_under_way_on_a_decode_worker(
    recorded: RecordedSpans, decoded: SequenceEvents, kinds: tuple[type[SequenceEvent], ...], failed: str
) -> None:
    emit(decoded, *kinds)
    decoded.emit(SequenceEnded(PeerLost("gone"), 0))
    assert [name for name in recorded.names if recorded.failure(name) == "PEER_LOST"] == [failed]


def test_a_request_of_an_unsampled_trace_has_no_spans(recorded: RecordedSpans) -> None:
    sequence = events_of(recorded, Role.DECODE, replace(SPEC, traceparent=f"00-{TRACE_ID}-{SPAN_ID}-00"))
    emit(sequence, BlocksReserved, TransferStarted, transferred, Started, FirstToken, Preempted)
    sequence.emit(SequenceEnded(InternalError("x"), 1))
    assert recorded.all == ()


def test_the_spans_of_work_name_the_number_of_choices_where_there_are_several(recorded: RecordedSpans) -> None:
    for spec in (SPEC, replace(SPEC, choices=tuple(map(ChoiceSpec, range(3))))):
        sequence = events_of(recorded, Role.PREFILL, spec)
        emit(sequence, Started, FirstToken)
        sequence.emit(SequenceEnded(None, 1))
    counts = [
        (span.attributes or {}).get("gen_ai.request.choice.count") for span in recorded.all if span.name == "prefill"
    ]
    assert counts == [None, 3]
