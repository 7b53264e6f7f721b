from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem import convert
from tandem.errors import (
    HandshakeMismatch,
    InvalidOutput,
    InvalidRequest,
    Overloaded,
    PeerLost,
    Reason,
    TandemError,
    Unavailable,
)
from tandem.types import (
    ChoiceSpec,
    FinishReason,
    GroupSpec,
    Handle,
    PoolCounts,
    Role,
    SamplingParams,
    TokenDelta,
    TokenId,
    TokenLogprobs,
    WorkerInfo,
    WorkerLoad,
)
from tandem.v1 import inference_pb2, registry_pb2, worker_pb2
from tests.fake_stream import step_of

UINT32 = st.integers(0, 2**32 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False)
NAMES = st.text(max_size=8)
TOKEN_IDS = st.lists(UINT32, max_size=5).map(tuple)
GROUPS: st.SearchStrategy[GroupSpec] = st.builds(
    GroupSpec,
    request_id=NAMES,
    prompt_token_ids=TOKEN_IDS,
    choices=st.lists(st.builds(ChoiceSpec, UINT32, TOKEN_IDS), max_size=4).map(tuple),
    timeout_s=st.none() | st.floats(allow_nan=False),
    priority=st.integers(-(2**31), 2**31 - 1),
    traceparent=NAMES,
    tracestate=NAMES,
    sampling=st.builds(
        SamplingParams,
        max_tokens=UINT32,
        min_tokens=UINT32,
        temperature=FLOAT32,
        top_k=UINT32,
        top_p=FLOAT32,
        min_p=FLOAT32,
        repetition_penalty=FLOAT32,
        presence_penalty=FLOAT32,
        frequency_penalty=FLOAT32,
        seed=st.integers(0, 2**64 - 1),
        end_token_ids=st.frozensets(UINT32, max_size=4),
        logprobs=st.none() | UINT32,
        logit_bias=st.dictionaries(UINT32, FLOAT32, max_size=4),
    ),
)
LOGPROBS = st.builds(
    TokenLogprobs,
    token_id=UINT32,
    logprob=FLOAT32,
    top=st.lists(st.tuples(UINT32, FLOAT32), max_size=3).map(tuple),
)
DELTAS: st.SearchStrategy[TokenDelta] = st.builds(
    TokenDelta,
    offset=st.integers(0, 2**31),
    token_ids=st.lists(UINT32, min_size=1, max_size=5).map(tuple),
    index=UINT32,
    logprobs=st.just(()) | st.lists(LOGPROBS, min_size=5, max_size=5).map(tuple),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    score=st.none() | FLOAT32,
).map(lambda delta: delta._replace(logprobs=delta.logprobs[: len(delta.token_ids)]))
INFOS: st.SearchStrategy[WorkerInfo] = st.builds(
    WorkerInfo,
    **cast(
        "dict[str, Any]",
        dict.fromkeys(
            (
                *("worker_id", "incarnation", "address", "model", "device"),
                *("config_fingerprint", "model_fingerprint", "layout_fingerprint"),
            ),
            NAMES,
        ),
    ),
    role=st.sampled_from(Role),
    transports=st.lists(NAMES, max_size=3).map(tuple),
    local_prefill_tokens=st.none() | UINT32,
    max_sequence_tokens=UINT32,
    pool_tokens=UINT32,
    pid=UINT32,
)
POOLS = st.builds(
    PoolCounts,
    **cast(
        "dict[str, Any]",
        dict.fromkeys(("total", "free", "reserved", "receiving", "live", "quarantined", "block_size"), UINT32),
    ),
    unused_slots=st.integers(0, 2**64 - 1),
)
LOADS: st.SearchStrategy[WorkerLoad] = st.builds(
    WorkerLoad,
    engine_steps=st.integers(0, 2**64 - 1),
    running_seqs=UINT32,
    waiting_seqs=UINT32,
    queued_prompt_tokens=st.integers(0, 2**64 - 1),
    pool=POOLS,
    live_transfers=UINT32,
    draining=st.booleans(),
    preemptions=st.integers(0, 2**64 - 1),
)


@given(GROUPS)
def test_a_group_survives_the_wire(spec: GroupSpec) -> None:
    wire = convert.group_to_proto(spec).SerializeToString()

    assert convert.group_from_proto(worker_pb2.Group.FromString(wire)) == spec


def over_the_wire(step: worker_pb2.StepOutputs) -> list[tuple[Handle, TokenDelta]]:
    return convert.deltas_from_proto(worker_pb2.StepOutputs.FromString(step.SerializeToString()))


@given(DELTAS)
def test_a_delta_survives_the_wire(delta: TokenDelta) -> None:
    assert over_the_wire(step_of(Handle(7), delta)) == [(7, delta)]


def test_rows_of_a_choice_are_one_delta_up_to_a_gap_or_its_end() -> None:
    deltas = [
        TokenDelta(0, (TokenId(1), TokenId(2))),
        TokenDelta(5, (TokenId(3),), finish_reason=FinishReason.STOP),
        TokenDelta(6, (TokenId(4),)),
    ]

    assert over_the_wire(step_of(Handle(7), *deltas)) == [(7, each) for each in deltas]


@pytest.mark.parametrize(
    "step",
    [
        worker_pb2.StepOutputs(handles=[1, 2], offsets=[0], token_ids=[5, 6]),
        worker_pb2.StepOutputs(
            handles=[1], offsets=[0], token_ids=[5], extras=[worker_pb2.TokenExtra(row=1, score=1.0)]
        ),
    ],
)
def test_columns_of_different_lengths_and_extras_of_no_row_are_refused(step: worker_pb2.StepOutputs) -> None:
    with pytest.raises(InvalidOutput):
        convert.deltas_from_proto(step)


@given(INFOS)
def test_a_workers_info_survives_the_wire(info: WorkerInfo) -> None:
    wire = convert.info_to_proto(info).SerializeToString()

    assert convert.info_from_proto(registry_pb2.WorkerInfo.FromString(wire)) == info


@given(LOADS)
def test_a_workers_load_survives_the_wire(load: WorkerLoad) -> None:
    wire = convert.load_to_proto(load).SerializeToString()

    assert convert.load_from_proto(registry_pb2.WorkerLoad.FromString(wire)) == load


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("prompt", "is empty"),
        HandshakeMismatch("dtype", "float32", "bfloat16"),
        Overloaded("pool is full"),
        PeerLost("the socket closed"),
        Unavailable("decode-1 is gone", Reason.WORKER_LOST),
    ],
)
def test_a_failure_survives_the_wire(error: TandemError) -> None:
    wire = convert.failed_to_proto(Handle(3), error).SerializeToString()
    read = convert.error_from_failed(worker_pb2.Failed.FromString(wire))

    assert type(read) is type(error)
    assert (read.message, read.reason, read.retryable) == (error.message, error.reason, error.retryable)
    assert getattr(read, "field", None) == getattr(error, "field", None)


def test_every_finish_reason_has_its_wire_value() -> None:
    for reason in (None, *FinishReason):
        assert convert.finish_reason_from_proto(convert.finish_reason_to_proto(reason)) is reason
    known = {convert.finish_reason_to_proto(reason) for reason in (None, *FinishReason)}
    assert known == set(inference_pb2.FinishReason.values())


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(KeyError):
        convert.info_from_proto(registry_pb2.WorkerInfo())
