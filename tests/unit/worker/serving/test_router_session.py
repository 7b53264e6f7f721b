from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from engine.step import SampledToken
from tandem.convert import deltas_from_proto
from tandem.errors import Overloaded
from tandem.types import FinishReason, Handle, Incarnation, TokenDelta, TokenId, TokenLogprobs, WaitReason
from tandem.v1 import inference_pb2, worker_pb2
from worker.serving.router_session import MAX_TOKENS_PER_MESSAGE, RouterSession

A, B = Handle(1), Handle(2)
LOGPROBS = TokenLogprobs(TokenId(1), -1.0, tuple((TokenId(i), -1.0) for i in range(20)))


def session_of(*handles: Handle) -> RouterSession:
    session = RouterSession(Incarnation("router"))
    for handle in handles:
        assert session.open_handle(handle)
    return session


def say(
    session: RouterSession,
    handle: Handle,
    offset: int,
    token_id: int,
    *,
    index: int = 0,
    finish: FinishReason | None = None,
    logprobs: TokenLogprobs | None = None,
) -> None:
    session.token(handle, index, offset, SampledToken(TokenId(token_id), logprobs), finish)


def delta(offset: int, *token_ids: int, index: int = 0, finish: FinishReason | None = None) -> TokenDelta:
    return TokenDelta(offset, tuple(map(TokenId, token_ids)), finish_reason=finish, index=index)


def outputs(responses: list[worker_pb2.ConnectResponse]) -> list[list[tuple[int, TokenDelta]]]:
    """Per StepOutputs message, the deltas in it."""
    return [deltas_from_proto(response.step_outputs) for response in responses if response.HasField("step_outputs")]


def kinds(session: RouterSession) -> list[str | None]:
    return [response.WhichOneof("message") for response in session.take()]


def test_a_steps_tokens_travel_in_one_message() -> None:
    session = session_of(A, B)
    say(session, A, 3, 10)
    say(session, B, 7, 20)

    assert outputs(session.take()) == [[(A, delta(3, 10)), (B, delta(7, 20))]]
    assert session.take() == []


def test_while_the_router_is_slow_the_tokens_of_a_choice_merge() -> None:
    session = session_of(A, B)
    for offset in range(3):
        say(session, A, offset, 10 + offset)
        say(session, A, offset + 5, 30 + offset, index=1)
        say(session, B, offset, 20 + offset)

    assert outputs(session.take()) == [
        [(A, delta(0, 10, 11, 12)), (A, delta(5, 30, 31, 32, index=1)), (B, delta(0, 20, 21, 22))]
    ]


def test_what_was_taken_is_not_written_to_again() -> None:
    session = session_of(A)
    say(session, A, 0, 10)
    first = session.take()
    say(session, A, 1, 11)

    assert outputs(first) == [[(A, delta(0, 10))]]
    assert outputs(session.take()) == [[(A, delta(1, 11))]]


def test_answers_come_before_the_tokens_of_a_request_and_its_end_after_them() -> None:
    session = session_of(A, B)
    session.prefill_done(A, 0.5, 0.25)
    say(session, A, 0, 1)
    session.handoff_done(A, 4096, 0.125)
    session.reserved(B, b"ticket", b"endpoint", 32)
    session.prefill_done(B, 0.5, 0.25)
    say(session, B, 0, 1)
    session.failed(B, Overloaded("full"))

    assert kinds(session) == ["prefill_done", "reserved", "prefill_done", "step_outputs", "handoff_done", "failed"]


def test_who_waits_is_told_last_and_by_the_newest_word_alone() -> None:
    session = session_of(A, B)
    session.waiting(WaitReason.PREFILL_LINE, [A, B])
    session.waiting(WaitReason.PREFILL_LINE, [B])
    session.waiting(WaitReason.PROMPT, [A])
    session.prefill_started(A)

    started, *waits = session.take()
    assert started.prefill_started.handle == A
    assert [each.waiting for each in waits] == [
        worker_pb2.Waiting(reason=worker_pb2.WAIT_REASON_PREFILL_LINE, handles=[B]),
        worker_pb2.Waiting(reason=worker_pb2.WAIT_REASON_PROMPT, handles=[A]),
    ]
    assert session.take() == []


def test_an_answer_carries_what_it_was_told() -> None:
    session = session_of(A)
    session.reserved(A, b"ticket", b"endpoint", 32)
    session.prefill_done(A, 0.5, 0.25, 8)
    session.handoff_done(A, 4096, 0.125)

    reserved, prefill_done, handoff_done = session.take()

    assert reserved.reserved == worker_pb2.Reserved(handle=A, ticket=b"ticket", kv_endpoint=b"endpoint", held_tokens=32)
    done = worker_pb2.PrefillDone(handle=A, queue_seconds=0.5, prefill_seconds=0.25, cached_tokens=8)
    assert prefill_done.prefill_done == done
    assert handoff_done.handoff_done == worker_pb2.HandoffDone(handle=A, transfer_bytes=4096, transfer_seconds=0.125)


def test_logprobs_travel_one_per_token() -> None:
    session = session_of(A)
    say(session, A, 0, 1, logprobs=LOGPROBS)
    say(session, A, 1, 2, logprobs=LOGPROBS)

    (((_, told),),) = outputs(session.take())

    assert told.token_ids == (1, 2)
    assert told.logprobs == (LOGPROBS, LOGPROBS)


def test_what_waits_of_a_released_request_is_dropped_and_late_words_go_nowhere() -> None:
    session = session_of(A, B)
    session.prefill_done(A, 0.0, 0.0)
    say(session, A, 0, 1)
    say(session, B, 0, 2)
    say(session, A, 0, 3, index=1)
    session.handoff_done(A, 1, 0.0)

    session.close_handle(A)
    session.close_handle(A)
    say(session, A, 1, 4)
    session.prefill_done(A, 0.0, 0.0)
    session.handoff_done(A, 1, 0.0)
    session.failed(A, Overloaded("late"))
    say(session, B, 1, 5)

    responses = session.take()
    assert outputs(responses) == [[(B, delta(0, 2, 5))]]
    assert len(responses) == 1


def test_a_message_whose_outputs_were_all_dropped_is_not_sent() -> None:
    session = session_of(A)
    say(session, A, 0, 1)
    session.close_handle(A)

    assert session.take() == []


def test_nothing_is_told_after_failed() -> None:
    session = session_of(A)
    session.failed(A, Overloaded("full"))
    say(session, A, 0, 1)
    session.failed(A, Overloaded("again"))

    assert kinds(session) == ["failed"]


def test_a_long_wait_becomes_messages_of_limited_size() -> None:
    session = session_of(A, B)
    num_tokens = MAX_TOKENS_PER_MESSAGE * 2 + 5
    for offset in range(2000):
        say(session, B, offset, 1, logprobs=LOGPROBS)
    for offset in range(num_tokens):
        say(session, A, offset, 2**31, finish=FinishReason.LENGTH if offset == num_tokens - 1 else None)

    responses = session.take()

    assert max(response.ByteSize() for response in responses) < 1024 * 1024
    merged: dict[int, int] = defaultdict(int)
    for message in outputs(responses):
        assert len({handle for handle, _ in message}) == len(message)
        for handle, piece in message:
            assert piece.offset == merged[handle]
            merged[handle] = piece.end
            assert (piece.finish_reason is FinishReason.LENGTH) == (piece.end == num_tokens)
    assert merged == {A: num_tokens, B: 2000}


def test_a_request_that_is_released_leaves_none_of_many_messages() -> None:
    session = session_of(A, B)
    for offset in range(MAX_TOKENS_PER_MESSAGE):
        say(session, A, offset, 1)
        say(session, B, offset, 2)

    session.close_handle(A)

    assert {handle for message in outputs(session.take()) for handle, _ in message} == {B}


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans()), max_size=60))
def test_however_it_is_taken_every_token_arrives_once_and_in_order(steps: list[tuple[int, int, bool]]) -> None:
    session = session_of(*map(Handle, range(4)))
    told: dict[tuple[int, int], list[int]] = defaultdict(list)
    arrived: dict[tuple[int, int], list[int]] = defaultdict(list)

    def take() -> None:
        for message in outputs(session.take()):
            for handle, piece in message:
                assert piece.offset == len(arrived[handle, piece.index])
                arrived[handle, piece.index] += piece.token_ids

    for handle, index, taken in steps:
        offset = len(told[handle, index])
        told[handle, index].append(offset)
        say(session, Handle(handle), offset, offset, index=index)
        if taken:
            take()
    take()

    assert arrived == told


def test_what_is_told_beside_a_token_hangs_off_its_row() -> None:
    session = session_of(A)
    say(session, A, 0, 5)
    say(session, A, 1, 6, index=1, logprobs=LOGPROBS)
    say(session, A, 2, 7, index=2, finish=FinishReason.STOP)

    (response,) = session.take()

    step = response.step_outputs
    assert (list(step.token_ids), list(step.offsets), list(step.indexes)) == ([5, 6, 7], [0, 1, 2], [0, 1, 2])
    assert [(each.row, each.finish_reason) for each in step.extras] == [
        (1, inference_pb2.FINISH_REASON_UNSPECIFIED),
        (2, inference_pb2.FINISH_REASON_STOP),
    ]
