from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from tandem.convert import delta_from_proto
from tandem.types import FinishReason, Handle, TokenDelta, TokenId, TokenLogprobs
from tandem.v1 import worker_pb2
from worker.outbox import MAX_TOKENS_PER_MESSAGE, Outbox

A, B = Handle(1), Handle(2)


def delta(offset: int, *token_ids: int, finish_reason: FinishReason | None = None) -> TokenDelta:
    return TokenDelta(offset, tuple(map(TokenId, token_ids)), finish_reason=finish_reason)


def reserved(handle: Handle) -> worker_pb2.ConnectResponse:
    return worker_pb2.ConnectResponse(reserved=worker_pb2.Reserved(handle=handle))


def outputs(responses: list[worker_pb2.ConnectResponse]) -> list[list[tuple[int, TokenDelta]]]:
    """Per StepOutputs message, its sequences' deltas."""
    return [
        [(each.handle, delta_from_proto(each)) for each in response.step_outputs.outputs]
        for response in responses
        if response.HasField("step_outputs")
    ]


def test_a_steps_deltas_travel_in_one_message_one_per_sequence() -> None:
    outbox = Outbox()
    for offset in range(3):
        outbox.add_delta(A, delta(offset, 10 + offset))
        outbox.add_delta(B, delta(offset, 20 + offset))

    assert outputs(outbox.take()) == [[(A, delta(0, 10, 11, 12)), (B, delta(0, 20, 21, 22))]]
    assert outbox.take() == []


def test_within_a_sequence_answers_come_first_and_failed_last() -> None:
    outbox = Outbox()
    outbox.add_failed(A, worker_pb2.Failed(handle=A))
    outbox.add_delta(A, delta(0, 1))
    outbox.add_answer(A, reserved(A))

    assert [response.WhichOneof("message") for response in outbox.take()] == ["reserved", "step_outputs", "failed"]


def test_the_end_of_a_sequence_is_kept_when_deltas_merge() -> None:
    outbox = Outbox()
    outbox.add_delta(A, delta(4, 1))
    outbox.add_delta(A, delta(5, 2, finish_reason=FinishReason.STOP))

    assert outputs(outbox.take()) == [[(A, delta(4, 1, 2, finish_reason=FinishReason.STOP))]]


def test_an_end_without_a_token_is_told() -> None:
    outbox = Outbox()
    outbox.add_delta(A, delta(4, finish_reason=FinishReason.LENGTH))

    assert outputs(outbox.take()) == [[(A, delta(0 + 4, finish_reason=FinishReason.LENGTH))]]


def test_what_is_discarded_is_not_told() -> None:
    outbox = Outbox()
    outbox.add_answer(A, reserved(A))
    outbox.add_delta(B, delta(0, 1))
    outbox.discard(A)
    outbox.discard(A)

    assert [response.WhichOneof("message") for response in outbox.take()] == ["step_outputs"]


def test_a_long_wait_becomes_messages_of_bearable_size() -> None:
    outbox = Outbox()
    num_tokens = MAX_TOKENS_PER_MESSAGE * 2 + 5
    logprobs = TokenLogprobs(TokenId(1), -1.0, tuple((TokenId(i), -1.0) for i in range(20)))
    outbox.add_delta(A, TokenDelta(0, (TokenId(1),) * num_tokens, finish_reason=FinishReason.LENGTH))
    outbox.add_delta(B, TokenDelta(0, (TokenId(1),) * 2000, logprobs=(logprobs,) * 2000))

    responses = outbox.take()

    assert max(response.ByteSize() for response in responses) < 1024 * 1024
    merged: dict[int, int] = defaultdict(int)
    for message in outputs(responses):
        assert len({handle for handle, _ in message}) == len(message)
        for handle, piece in message:
            assert piece.offset == merged[handle]
            merged[handle] = piece.end
            assert piece.finish_reason is (FinishReason.LENGTH if piece.end == num_tokens else None)
    assert merged == {A: num_tokens, B: 2000}


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.booleans()), max_size=40))
def test_however_it_is_taken_every_token_arrives_once_and_in_order(steps: list[tuple[int, int, bool]]) -> None:
    outbox = Outbox()
    given_tokens: dict[int, list[int]] = defaultdict(list)
    arrived: dict[int, list[int]] = defaultdict(list)

    def take() -> None:
        for message in outputs(outbox.take()):
            for handle, piece in message:
                assert piece.offset == len(arrived[handle])
                arrived[handle] += piece.token_ids

    for handle, num_tokens, taken in steps:
        offset = len(given_tokens[handle])
        token_ids = list(range(offset, offset + num_tokens))
        given_tokens[handle] += token_ids
        outbox.add_delta(Handle(handle), delta(offset, *token_ids))
        if taken:
            take()
    take()

    assert arrived == given_tokens
