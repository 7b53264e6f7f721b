from tandem.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WaitReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WAIT_REASON_UNSPECIFIED: _ClassVar[WaitReason]
    WAIT_REASON_PREFILL_LINE: _ClassVar[WaitReason]
    WAIT_REASON_PROMPT: _ClassVar[WaitReason]
    WAIT_REASON_GRANT: _ClassVar[WaitReason]
    WAIT_REASON_HANDOFF: _ClassVar[WaitReason]
    WAIT_REASON_ROOM: _ClassVar[WaitReason]
    WAIT_REASON_SEAT: _ClassVar[WaitReason]
    WAIT_REASON_PREEMPTED: _ClassVar[WaitReason]
    WAIT_REASON_SEARCH: _ClassVar[WaitReason]
WAIT_REASON_UNSPECIFIED: WaitReason
WAIT_REASON_PREFILL_LINE: WaitReason
WAIT_REASON_PROMPT: WaitReason
WAIT_REASON_GRANT: WaitReason
WAIT_REASON_HANDOFF: WaitReason
WAIT_REASON_ROOM: WaitReason
WAIT_REASON_SEAT: WaitReason
WAIT_REASON_PREEMPTED: WaitReason
WAIT_REASON_SEARCH: WaitReason

class ResolvedSampling(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "end_token_ids", "logprobs", "logit_bias", "beam_width", "length_penalty", "early_stopping", "prompt_logprobs", "json_schema", "regex", "grammar", "choice")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    BEAM_WIDTH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    end_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: int
    logit_bias: _containers.ScalarMap[int, float]
    beam_width: int
    length_penalty: float
    early_stopping: _inference_pb2.EarlyStopping
    prompt_logprobs: int
    json_schema: str
    regex: str
    grammar: str
    choice: _inference_pb2.ChoiceConstraint
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., end_token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., beam_width: _Optional[int] = ..., length_penalty: _Optional[float] = ..., early_stopping: _Optional[_Union[_inference_pb2.EarlyStopping, str]] = ..., prompt_logprobs: _Optional[int] = ..., json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ..., choice: _Optional[_Union[_inference_pb2.ChoiceConstraint, _Mapping]] = ...) -> None: ...

class GroupChoice(_message.Message):
    __slots__ = ("index", "output_token_ids")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    index: int
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, index: _Optional[int] = ..., output_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "choices", "sampling", "timeout_seconds", "priority", "traceparent", "tracestate", "cache_salt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    choices: _containers.RepeatedCompositeFieldContainer[GroupChoice]
    sampling: ResolvedSampling
    timeout_seconds: float
    priority: int
    traceparent: str
    tracestate: str
    cache_salt: str
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., choices: _Optional[_Iterable[_Union[GroupChoice, _Mapping]]] = ..., sampling: _Optional[_Union[ResolvedSampling, _Mapping]] = ..., timeout_seconds: _Optional[float] = ..., priority: _Optional[int] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class RouterHello(_message.Message):
    __slots__ = ("router_incarnation",)
    ROUTER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    router_incarnation: str
    def __init__(self, router_incarnation: _Optional[str] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("handle", "group", "local_prefill", "max_local_tokens")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_FIELD_NUMBER: _ClassVar[int]
    MAX_LOCAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    group: Group
    local_prefill: bool
    max_local_tokens: int
    def __init__(self, handle: _Optional[int] = ..., group: _Optional[_Union[Group, _Mapping]] = ..., local_prefill: bool = ..., max_local_tokens: _Optional[int] = ...) -> None: ...

class Prefill(_message.Message):
    __slots__ = ("handle", "group", "destination")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    handle: int
    group: Group
    destination: str
    def __init__(self, handle: _Optional[int] = ..., group: _Optional[_Union[Group, _Mapping]] = ..., destination: _Optional[str] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("handle", "ticket", "kv_endpoint")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    KV_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    handle: int
    ticket: bytes
    kv_endpoint: bytes
    def __init__(self, handle: _Optional[int] = ..., ticket: _Optional[bytes] = ..., kv_endpoint: _Optional[bytes] = ...) -> None: ...

class HandOver(_message.Message):
    __slots__ = ("handle", "output_tokens", "ticket", "kv_endpoint", "choices")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    KV_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    handle: int
    output_tokens: int
    ticket: bytes
    kv_endpoint: bytes
    choices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, handle: _Optional[int] = ..., output_tokens: _Optional[int] = ..., ticket: _Optional[bytes] = ..., kv_endpoint: _Optional[bytes] = ..., choices: _Optional[_Iterable[int]] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    def __init__(self, handle: _Optional[int] = ...) -> None: ...

class ConnectRequest(_message.Message):
    __slots__ = ("hello", "reserve", "prefill", "release", "grant", "hand_over")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    HAND_OVER_FIELD_NUMBER: _ClassVar[int]
    hello: RouterHello
    reserve: Reserve
    prefill: Prefill
    release: Release
    grant: Grant
    hand_over: HandOver
    def __init__(self, hello: _Optional[_Union[RouterHello, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., prefill: _Optional[_Union[Prefill, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., hand_over: _Optional[_Union[HandOver, _Mapping]] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("incarnation",)
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    def __init__(self, incarnation: _Optional[str] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("handle", "ticket", "kv_endpoint", "held_tokens")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    KV_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    ticket: bytes
    kv_endpoint: bytes
    held_tokens: int
    def __init__(self, handle: _Optional[int] = ..., ticket: _Optional[bytes] = ..., kv_endpoint: _Optional[bytes] = ..., held_tokens: _Optional[int] = ...) -> None: ...

class PrefillStarted(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    def __init__(self, handle: _Optional[int] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ("reason", "handles")
    REASON_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    reason: WaitReason
    handles: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, reason: _Optional[_Union[WaitReason, str]] = ..., handles: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenExtra(_message.Message):
    __slots__ = ("row", "logprobs", "finish_reason", "score")
    ROW_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    row: int
    logprobs: _inference_pb2.TokenLogprobs
    finish_reason: _inference_pb2.FinishReason
    score: float
    def __init__(self, row: _Optional[int] = ..., logprobs: _Optional[_Union[_inference_pb2.TokenLogprobs, _Mapping]] = ..., finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., score: _Optional[float] = ...) -> None: ...

class StepOutputs(_message.Message):
    __slots__ = ("handles", "indexes", "offsets", "token_ids", "extras")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EXTRAS_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[int]
    indexes: _containers.RepeatedScalarFieldContainer[int]
    offsets: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    extras: _containers.RepeatedCompositeFieldContainer[TokenExtra]
    def __init__(self, handles: _Optional[_Iterable[int]] = ..., indexes: _Optional[_Iterable[int]] = ..., offsets: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., extras: _Optional[_Iterable[_Union[TokenExtra, _Mapping]]] = ...) -> None: ...

class PrefillDone(_message.Message):
    __slots__ = ("handle", "queue_seconds", "prefill_seconds", "cached_tokens")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    queue_seconds: float
    prefill_seconds: float
    cached_tokens: int
    def __init__(self, handle: _Optional[int] = ..., queue_seconds: _Optional[float] = ..., prefill_seconds: _Optional[float] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("handle", "offset", "logprobs")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    offset: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprobs]
    def __init__(self, handle: _Optional[int] = ..., offset: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class CacheChanges(_message.Message):
    __slots__ = ("stored", "removed", "cleared")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    stored: _containers.RepeatedScalarFieldContainer[int]
    removed: _containers.RepeatedScalarFieldContainer[int]
    cleared: bool
    def __init__(self, stored: _Optional[_Iterable[int]] = ..., removed: _Optional[_Iterable[int]] = ..., cleared: bool = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    def __init__(self, handle: _Optional[int] = ...) -> None: ...

class HandoffDone(_message.Message):
    __slots__ = ("handle", "transfer_bytes", "transfer_seconds", "transport", "passed_over")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    PASSED_OVER_FIELD_NUMBER: _ClassVar[int]
    handle: int
    transfer_bytes: int
    transfer_seconds: float
    transport: str
    passed_over: str
    def __init__(self, handle: _Optional[int] = ..., transfer_bytes: _Optional[int] = ..., transfer_seconds: _Optional[float] = ..., transport: _Optional[str] = ..., passed_over: _Optional[str] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("handle", "reason", "message", "retryable", "field")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    handle: int
    reason: str
    message: str
    retryable: bool
    field: str
    def __init__(self, handle: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., retryable: bool = ..., field: _Optional[str] = ...) -> None: ...

class ConnectResponse(_message.Message):
    __slots__ = ("hello", "reserved", "prefill_done", "handoff_done", "step_outputs", "failed", "prefill_started", "waiting", "prompt_logprobs", "cache_changes", "leaving")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_DONE_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_DONE_FIELD_NUMBER: _ClassVar[int]
    STEP_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_STARTED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHE_CHANGES_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    hello: WorkerHello
    reserved: Reserved
    prefill_done: PrefillDone
    handoff_done: HandoffDone
    step_outputs: StepOutputs
    failed: Failed
    prefill_started: PrefillStarted
    waiting: Waiting
    prompt_logprobs: PromptLogprobs
    cache_changes: CacheChanges
    leaving: Leaving
    def __init__(self, hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., reserved: _Optional[_Union[Reserved, _Mapping]] = ..., prefill_done: _Optional[_Union[PrefillDone, _Mapping]] = ..., handoff_done: _Optional[_Union[HandoffDone, _Mapping]] = ..., step_outputs: _Optional[_Union[StepOutputs, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., prefill_started: _Optional[_Union[PrefillStarted, _Mapping]] = ..., waiting: _Optional[_Union[Waiting, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., cache_changes: _Optional[_Union[CacheChanges, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ...) -> None: ...
