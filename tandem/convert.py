"""Protobuf to dataclasses and back: the only file that knows both.

Fields of the same name and form are copied by `_message` and `plain`; what differs is written out.
Pure and total for well-formed messages: values are not judged here (see `validation`).
`sampling.resolve_sampling` judges and fills in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import fields
from typing import Any, TypeVar, cast

from google.protobuf.message import Message

from tandem.cluster_status import (
    ClusterStatus,
    HandoffPair,
    LatencySummary,
    PlacementCount,
    ReasonCount,
    RecentActivity,
    SlowRequest,
    WorkerStatus,
)
from tandem.decision import Decision
from tandem.errors import InvalidOutput, TandemError, rebuild_error
from tandem.token_ids import TokenIds
from tandem.types import (
    ChoiceSpec,
    Constraint,
    EarlyStopping,
    FinishReason,
    GroupSpec,
    Handle,
    Language,
    PoolCounts,
    Role,
    SamplingParams,
    TokenDelta,
    TokenId,
    TokenLogprobs,
    WaitReason,
    WorkerInfo,
    WorkerLoad,
)
from tandem.v1 import cluster_pb2, inference_pb2, registry_pb2, worker_pb2

D = TypeVar("D")
M = TypeVar("M", bound=Message)

_FINISH_TO_PROTO: dict[FinishReason, inference_pb2.FinishReason] = {
    each: getattr(inference_pb2, f"FINISH_REASON_{each.name}") for each in FinishReason
}
_FINISH_FROM_PROTO = {value: key for key, value in _FINISH_TO_PROTO.items()}
_WAIT_TO_PROTO: dict[WaitReason, worker_pb2.WaitReason] = {
    each: getattr(worker_pb2, f"WAIT_REASON_{each.name}") for each in WaitReason
}
_EARLY_STOPPING_TO_PROTO: dict[EarlyStopping, inference_pb2.EarlyStopping] = {
    each: getattr(inference_pb2, f"EARLY_STOPPING_{each.name}") for each in EarlyStopping
}
_EARLY_STOPPING_FROM_PROTO = {value: key for key, value in _EARLY_STOPPING_TO_PROTO.items()}
_ROLE_TO_PROTO: dict[Role, registry_pb2.WorkerRole] = {
    each: getattr(registry_pb2, f"WORKER_ROLE_{each.name}") for each in Role
}
_ROLE_FROM_PROTO = {value: key for key, value in _ROLE_TO_PROTO.items()}
_IN_PROTOBUF = {
    **{name: f"{name}_blocks" for name in ("total", "free", "reserved", "receiving", "live", "quarantined", "cached")},
    **{
        f"{name}_s": f"{name}_seconds"
        for name in (
            *("timeout", "heartbeat_age", "uptime", "window", "p50", "p90", "p99", "step", "step_objective"),
            *("queue", "prefill", "transfer", "first_token", "total", "median", "age"),
        )
    },
    "num_bytes": "bytes",
    **{f"{name}_per_s": f"{name}_per_second" for name in ("requests", "tokens", "prompt_tokens", "steps")},
}
"""Names of protobuf fields that differ, by the names of the dataclass fields."""
_NAMES: dict[type, tuple[tuple[str, str], ...]] = {}


def finish_reason_to_proto(reason: FinishReason | None) -> inference_pb2.FinishReason:
    """None = not ended yet."""
    return inference_pb2.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_TO_PROTO[reason]


def finish_reason_from_proto(reason: inference_pb2.FinishReason) -> FinishReason | None:
    """None = not ended yet, or a reason that this version does not know."""
    return _FINISH_FROM_PROTO.get(reason)


def wait_reason_to_proto(reason: WaitReason) -> worker_pb2.WaitReason:
    """Why a request waits, as a worker says."""
    return _WAIT_TO_PROTO[reason]


def early_stopping_to_proto(value: EarlyStopping | str) -> inference_pb2.EarlyStopping:
    """Raises ValueError for a word that is none."""
    return _EARLY_STOPPING_TO_PROTO[EarlyStopping(value)]


def early_stopping_from_proto(value: inference_pb2.EarlyStopping) -> EarlyStopping | None:
    """None = unspecified, or a value that this version does not know."""
    return _EARLY_STOPPING_FROM_PROTO.get(value)


def group_to_proto(spec: GroupSpec) -> worker_pb2.Group:
    """The message that brings a request to a worker."""
    sampling = _message(
        worker_pb2.ResolvedSampling,
        spec.sampling,
        without=("constraint",),
        end_token_ids=sorted(spec.sampling.end_token_ids),
        logit_bias=dict(spec.sampling.logit_bias),
        early_stopping=_EARLY_STOPPING_TO_PROTO[spec.sampling.early_stopping],
        **_constraint_to_proto(spec.sampling.constraint),
    )
    choices = [_message(worker_pb2.GroupChoice, each) for each in spec.choices]
    return _message(worker_pb2.Group, spec, choices=choices, sampling=sampling)


def group_from_proto(message: worker_pb2.Group, prompt_token_ids: TokenIds | None = None) -> GroupSpec:
    """A request as it came from a router; not yet validated. `prompt_token_ids`: its own, if they were read before."""
    sampling = message.sampling
    return plain(
        GroupSpec,
        message,
        prompt_token_ids=TokenIds(message.prompt_token_ids) if prompt_token_ids is None else prompt_token_ids,
        choices=tuple(ChoiceSpec(each.index, _token_ids(each.output_token_ids)) for each in message.choices),
        sampling=plain(
            SamplingParams,
            sampling,
            end_token_ids=frozenset(sampling.end_token_ids),
            logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
            logit_bias=dict(sampling.logit_bias),
            early_stopping=early_stopping_from_proto(sampling.early_stopping) or EarlyStopping.HEURISTIC,
            prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
            constraint=_constraint_from_proto(sampling),
        ),
        timeout_s=message.timeout_seconds if message.HasField("timeout_seconds") else None,
    )


def _constraint_to_proto(constraint: Constraint | None) -> dict[str, Any]:
    """The field of the oneof that it takes; none if there is no constraint."""
    if constraint is None:
        return {}
    if constraint.language is Language.CHOICE:
        return {"choice": inference_pb2.ChoiceConstraint(choices=constraint.texts)}
    return {constraint.language.value: constraint.texts[0]}


def _constraint_from_proto(message: worker_pb2.ResolvedSampling) -> Constraint | None:
    name = message.WhichOneof("constraint")
    if name is None:
        return None
    texts = tuple(message.choice.choices) if name == "choice" else (getattr(message, name),)
    return Constraint(Language(name), texts)


def deltas_from_proto(step: worker_pb2.StepOutputs) -> list[tuple[Handle, TokenDelta]]:
    """Returns the tokens of a message: rows of one choice without a gap make one delta.

    Raises InvalidOutput if the columns differ in length, or an extra is of none of their rows.
    """
    handles, offsets, token_ids = list(step.handles), list(step.offsets), list(step.token_ids)
    indexes = list(step.indexes) or [0] * len(handles)
    if not len(handles) == len(indexes) == len(offsets) == len(token_ids):
        raise InvalidOutput(f"columns of {len(handles)}, {len(indexes)}, {len(offsets)} and {len(token_ids)} rows")
    deltas = [
        (Handle(handle), TokenDelta(offset, (TokenId(token_id),), (), None, index))
        for handle, index, offset, token_id in zip(handles, indexes, offsets, token_ids, strict=True)
    ]
    for extra in step.extras:
        if extra.row >= len(deltas):
            raise InvalidOutput(f"an extra of row {extra.row} of {len(deltas)}")
        handle, delta = deltas[extra.row]
        deltas[extra.row] = handle, _with_extra(delta, extra)
    return deltas if len(set(handles)) == len(handles) else _merged(deltas)


def _with_extra(delta: TokenDelta, extra: worker_pb2.TokenExtra) -> TokenDelta:
    return delta._replace(
        logprobs=(logprobs_from_proto(extra.logprobs),) if extra.HasField("logprobs") else (),
        finish_reason=_FINISH_FROM_PROTO.get(extra.finish_reason),
        score=extra.score if extra.HasField("score") else None,
    )


def _merged(deltas: Iterable[tuple[Handle, TokenDelta]]) -> list[tuple[Handle, TokenDelta]]:
    """Returns one delta for each run of a choice that has no gap and does not go on behind the choice's end."""
    runs: list[tuple[Handle, list[TokenDelta]]] = []
    newest: dict[tuple[Handle, int], list[TokenDelta]] = {}
    for handle, delta in deltas:
        run = newest.get((handle, delta.index))
        if run is None or run[-1].end != delta.offset or run[-1].finish_reason is not None:
            run = newest[handle, delta.index] = []
            runs.append((handle, run))
        run.append(delta)
    return [(handle, run[0] if len(run) == 1 else _joined(run)) for handle, run in runs]


def _joined(run: list[TokenDelta]) -> TokenDelta:
    return run[-1]._replace(
        offset=run[0].offset,
        token_ids=tuple(token_id for each in run for token_id in each.token_ids),
        logprobs=tuple(logprobs for each in run for logprobs in each.logprobs),
    )


def logprobs_to_proto(logprobs: TokenLogprobs) -> inference_pb2.TokenLogprobs:
    """Converts the log-probabilities of a position."""
    return inference_pb2.TokenLogprobs(
        token_id=logprobs.token_id,
        logprob=logprobs.logprob,
        top=[inference_pb2.TopLogprob(token_id=token_id, logprob=value) for token_id, value in logprobs.top],
    )


def logprobs_from_proto(message: inference_pb2.TokenLogprobs) -> TokenLogprobs:
    """Converts the log-probabilities of a position."""
    return TokenLogprobs(
        token_id=TokenId(message.token_id),
        logprob=message.logprob,
        top=tuple((TokenId(each.token_id), each.logprob) for each in message.top),
    )


def failed_to_proto(handle: Handle, error: TandemError) -> worker_pb2.Failed:
    """The end of a sequence without all its tokens."""
    return worker_pb2.Failed(
        handle=handle,
        reason=error.reason.value,
        message=error.message,
        retryable=error.retryable,
        field=error.field,
    )


def error_from_failed(message: worker_pb2.Failed) -> TandemError:
    """The error that the worker meant, of the same class."""
    error = rebuild_error(message.reason, message.message, field=message.field)
    error.retryable = message.retryable
    return error


def info_to_proto(info: WorkerInfo) -> registry_pb2.WorkerInfo:
    """A worker's first words."""
    decisions = _messages(info, decisions=registry_pb2.Decision)
    return _message(registry_pb2.WorkerInfo, info, role=_ROLE_TO_PROTO[info.role], **decisions)


def info_from_proto(message: registry_pb2.WorkerInfo) -> WorkerInfo:
    """A worker's first words. Raises KeyError on an unknown role."""
    return plain(
        WorkerInfo,
        message,
        role=_ROLE_FROM_PROTO[message.role],
        transports=tuple(message.transports),
        **_plains(message, decisions=Decision),
        local_prefill_tokens=message.local_prefill_tokens if message.HasField("local_prefill_tokens") else None,
    )


def load_to_proto(load: WorkerLoad) -> registry_pb2.WorkerLoad:
    """A heartbeat."""
    return _message(registry_pb2.WorkerLoad, load, pool=_message(registry_pb2.PoolStatus, load.pool))


def load_from_proto(message: registry_pb2.WorkerLoad) -> WorkerLoad:
    """A heartbeat."""
    return plain(WorkerLoad, message, pool=plain(PoolCounts, message.pool))


def status_to_proto(status: ClusterStatus) -> cluster_pb2.GetStatusResponse:
    """The answer of GetStatus."""
    workers = [
        _message(cluster_pb2.WorkerStatus, each, info=info_to_proto(each.info), load=load_to_proto(each.load))
        for each in status.workers
    ]
    activity = _messages(
        status.recent,
        latencies=cluster_pb2.LatencySummary,
        placements=cluster_pb2.PlacementCount,
        last_placements=cluster_pb2.PlacementCount,
    )
    others = _messages(
        status,
        decisions=registry_pb2.Decision,
        handoffs=cluster_pb2.HandoffPair,
        failures=cluster_pb2.ReasonCount,
        refusals=cluster_pb2.ReasonCount,
        slow_requests=cluster_pb2.SlowRequest,
    )
    recent = _message(cluster_pb2.RecentActivity, status.recent, **activity)
    return _message(cluster_pb2.GetStatusResponse, status, workers=workers, recent=recent, **others)


def status_from_proto(message: cluster_pb2.GetStatusResponse) -> ClusterStatus:
    """The answer of GetStatus. Raises KeyError on a worker of an unknown role."""
    workers = tuple(
        plain(WorkerStatus, each, info=info_from_proto(each.info), load=load_from_proto(each.load))
        for each in message.workers
    )
    activity = _plains(
        message.recent, latencies=LatencySummary, placements=PlacementCount, last_placements=PlacementCount
    )
    others = _plains(
        message,
        decisions=Decision,
        handoffs=HandoffPair,
        failures=ReasonCount,
        refusals=ReasonCount,
        slow_requests=SlowRequest,
    )
    recent = plain(RecentActivity, message.recent, **activity)
    return plain(ClusterStatus, message, workers=workers, recent=recent, **others)


def _message(cls: type[M], value: Any, without: Collection[str] = (), **different: Any) -> M:
    """A message of the fields of `value`, a dataclass, except those given; None leaves an optional field unset."""
    names = ((here, there) for here, there in _names(type(value)) if here not in without and there not in different)
    return cls(**{there: getattr(value, here) for here, there in names}, **different)


def _messages(value: Any, **classes: type[Message]) -> dict[str, Any]:
    """Fields of `value` that are tuples, as lists of messages of the classes given."""
    return {name: [_message(cls, each) for each in getattr(value, name)] for name, cls in classes.items()}


def _plains(message: Message, **classes: type[Any]) -> dict[str, Any]:
    """The reverse."""
    return {name: tuple(plain(cls, each) for each in getattr(message, name)) for name, cls in classes.items()}


def plain(cls: type[D], message: Message, **different: Any) -> D:
    """A dataclass of the fields of `message`, except those given: all that are repeated, optional or messages."""
    same = {here: getattr(message, there) for here, there in _names(cls) if here not in different}
    return cls(**same, **different)


def _names(cls: Any) -> tuple[tuple[str, str], ...]:
    """Pairs of a dataclass field's name and its message field's name, listed once per class."""
    if cls not in _NAMES:
        _NAMES[cls] = tuple((field.name, _IN_PROTOBUF.get(field.name, field.name)) for field in fields(cls))
    return _NAMES[cls]


def _token_ids(ids: Iterable[int]) -> tuple[TokenId, ...]:
    return tuple(cast("Iterable[TokenId]", ids))  # a call for each would take a long prompt a tenth of a second
