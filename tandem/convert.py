"""Protobuf to dataclasses and back: the only file that knows both.

Pure and total for well-formed messages: values are not judged here (see `validation`).
`sampling.resolve_sampling` judges and fills in.
"""

from __future__ import annotations

from collections.abc import Iterable

from tandem.errors import TandemError, rebuild_error
from tandem.types import (
    ChoiceSpec,
    FinishReason,
    GroupSpec,
    Handle,
    Incarnation,
    PoolCounts,
    RequestId,
    Role,
    SamplingParams,
    TokenDelta,
    TokenId,
    TokenLogprobs,
    WorkerId,
    WorkerInfo,
    WorkerLoad,
)
from tandem.v1 import inference_pb2, registry_pb2, worker_pb2

__all__ = [
    "delta_from_proto",
    "delta_to_proto",
    "error_from_failed",
    "failed_to_proto",
    "finish_reason_from_proto",
    "finish_reason_to_proto",
    "group_from_proto",
    "group_to_proto",
    "info_from_proto",
    "info_to_proto",
    "load_from_proto",
    "load_to_proto",
    "logprobs_from_proto",
    "logprobs_to_proto",
    "pool_from_proto",
    "pool_to_proto",
]

_FINISH_TO_PROTO = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}
_FINISH_FROM_PROTO = {value: key for key, value in _FINISH_TO_PROTO.items()}
_ROLE_TO_PROTO = {
    Role.PREFILL: registry_pb2.WORKER_ROLE_PREFILL,
    Role.DECODE: registry_pb2.WORKER_ROLE_DECODE,
}
_ROLE_FROM_PROTO = {value: key for key, value in _ROLE_TO_PROTO.items()}


def finish_reason_to_proto(reason: FinishReason | None) -> inference_pb2.FinishReason:
    """None = not ended yet."""
    return inference_pb2.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_TO_PROTO[reason]


def finish_reason_from_proto(reason: inference_pb2.FinishReason) -> FinishReason | None:
    """None = not ended yet, or a reason that this version does not know."""
    return _FINISH_FROM_PROTO.get(reason)


def group_to_proto(spec: GroupSpec) -> worker_pb2.Group:
    """A request as it travels to a worker."""
    return worker_pb2.Group(
        request_id=spec.request_id,
        prompt_token_ids=spec.prompt_token_ids,
        choices=[
            worker_pb2.GroupChoice(index=each.index, output_token_ids=each.output_token_ids) for each in spec.choices
        ],
        sampling=_sampling_to_proto(spec.sampling),
        timeout_seconds=spec.timeout_s,
        priority=spec.priority,
        traceparent=spec.traceparent,
        tracestate=spec.tracestate,
    )


def group_from_proto(message: worker_pb2.Group) -> GroupSpec:
    """A request as it came from a router; not yet validated."""
    return GroupSpec(
        request_id=RequestId(message.request_id),
        prompt_token_ids=_token_ids(message.prompt_token_ids),
        sampling=_sampling_from_proto(message.sampling),
        choices=tuple(ChoiceSpec(each.index, _token_ids(each.output_token_ids)) for each in message.choices),
        timeout_s=message.timeout_seconds if message.HasField("timeout_seconds") else None,
        priority=message.priority,
        traceparent=message.traceparent,
        tracestate=message.tracestate,
    )


def _sampling_to_proto(sampling: SamplingParams) -> worker_pb2.ResolvedSampling:
    return worker_pb2.ResolvedSampling(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed,
        end_token_ids=sorted(sampling.end_token_ids),
        logprobs=sampling.logprobs,
        logit_bias={int(key): value for key, value in sampling.logit_bias.items()},
    )


def _sampling_from_proto(message: worker_pb2.ResolvedSampling) -> SamplingParams:
    return SamplingParams(
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        seed=message.seed,
        end_token_ids=frozenset(TokenId(each) for each in message.end_token_ids),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        logit_bias={TokenId(key): value for key, value in message.logit_bias.items()},
    )


def delta_to_proto(handle: Handle, delta: TokenDelta) -> worker_pb2.SequenceOutput:
    """New tokens of the sequence that `handle` names."""
    return worker_pb2.SequenceOutput(
        handle=handle,
        offset=delta.offset,
        token_ids=delta.token_ids,
        logprobs=[logprobs_to_proto(each) for each in delta.logprobs],
        finish_reason=finish_reason_to_proto(delta.finish_reason),
        index=delta.index,
    )


def delta_from_proto(message: worker_pb2.SequenceOutput) -> TokenDelta:
    """New tokens; the handle is read from the message by whoever needs it."""
    return TokenDelta(
        offset=message.offset,
        token_ids=_token_ids(message.token_ids),
        logprobs=tuple(logprobs_from_proto(each) for each in message.logprobs),
        finish_reason=finish_reason_from_proto(message.finish_reason),
        index=message.index,
    )


def logprobs_to_proto(logprobs: TokenLogprobs) -> inference_pb2.TokenLogprobs:
    """One position's log-probabilities."""
    return inference_pb2.TokenLogprobs(
        token_id=logprobs.token_id,
        logprob=logprobs.logprob,
        top=[inference_pb2.TopLogprob(token_id=token_id, logprob=value) for token_id, value in logprobs.top],
    )


def logprobs_from_proto(message: inference_pb2.TokenLogprobs) -> TokenLogprobs:
    """One position's log-probabilities."""
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
        field=getattr(error, "field", ""),
    )


def error_from_failed(message: worker_pb2.Failed) -> TandemError:
    """The error that the worker meant, of the same class."""
    error = rebuild_error(message.reason, message.message, field=message.field)
    error.retryable = message.retryable
    return error


def info_to_proto(info: WorkerInfo) -> registry_pb2.WorkerInfo:
    """A worker's first words."""
    return registry_pb2.WorkerInfo(
        worker_id=info.worker_id,
        incarnation=info.incarnation,
        role=_ROLE_TO_PROTO[info.role],
        address=info.address,
        model=info.model,
        config_fingerprint=info.config_fingerprint,
        model_fingerprint=info.model_fingerprint,
        layout_fingerprint=info.layout_fingerprint,
        transports=info.transports,
        local_prefill_tokens=info.local_prefill_tokens,
        max_sequence_tokens=info.max_sequence_tokens,
        pid=info.pid,
        device=info.device,
        admin_address=info.admin_address,
        pool_tokens=info.pool_tokens,
    )


def info_from_proto(message: registry_pb2.WorkerInfo) -> WorkerInfo:
    """A worker's first words. Raises KeyError on an unknown role."""
    return WorkerInfo(
        worker_id=WorkerId(message.worker_id),
        incarnation=Incarnation(message.incarnation),
        role=_ROLE_FROM_PROTO[message.role],
        address=message.address,
        model=message.model,
        config_fingerprint=message.config_fingerprint,
        model_fingerprint=message.model_fingerprint,
        layout_fingerprint=message.layout_fingerprint,
        transports=tuple(message.transports),
        local_prefill_tokens=message.local_prefill_tokens if message.HasField("local_prefill_tokens") else None,
        max_sequence_tokens=message.max_sequence_tokens,
        pid=message.pid,
        device=message.device,
        admin_address=message.admin_address,
        pool_tokens=message.pool_tokens,
    )


def pool_to_proto(pool: PoolCounts) -> registry_pb2.PoolStatus:
    """A pool's blocks by state."""
    return registry_pb2.PoolStatus(
        total_blocks=pool.total,
        free_blocks=pool.free,
        reserved_blocks=pool.reserved,
        receiving_blocks=pool.receiving,
        live_blocks=pool.live,
        quarantined_blocks=pool.quarantined,
        block_size=pool.block_size,
        unused_slots=pool.unused_slots,
        cached_blocks=pool.cached,
    )


def pool_from_proto(message: registry_pb2.PoolStatus) -> PoolCounts:
    """A pool's blocks by state."""
    return PoolCounts(
        total=message.total_blocks,
        free=message.free_blocks,
        reserved=message.reserved_blocks,
        receiving=message.receiving_blocks,
        live=message.live_blocks,
        quarantined=message.quarantined_blocks,
        block_size=message.block_size,
        unused_slots=message.unused_slots,
        cached=message.cached_blocks,
    )


def load_to_proto(load: WorkerLoad) -> registry_pb2.WorkerLoad:
    """A heartbeat."""
    return registry_pb2.WorkerLoad(
        engine_steps=load.engine_steps,
        running_seqs=load.running_seqs,
        waiting_seqs=load.waiting_seqs,
        queued_prompt_tokens=load.queued_prompt_tokens,
        pool=pool_to_proto(load.pool),
        live_transfers=load.live_transfers,
        draining=load.draining,
        preemptions=load.preemptions,
    )


def load_from_proto(message: registry_pb2.WorkerLoad) -> WorkerLoad:
    """A heartbeat."""
    return WorkerLoad(
        engine_steps=message.engine_steps,
        running_seqs=message.running_seqs,
        waiting_seqs=message.waiting_seqs,
        queued_prompt_tokens=message.queued_prompt_tokens,
        pool=pool_from_proto(message.pool),
        live_transfers=message.live_transfers,
        draining=message.draining,
        preemptions=message.preemptions,
    )


def _token_ids(ids: Iterable[int]) -> tuple[TokenId, ...]:
    return tuple(map(TokenId, ids))
