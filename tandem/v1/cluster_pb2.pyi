from tandem.v1 import registry_pb2 as _registry_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("info", "load", "heartbeat_age_seconds", "connected", "set_aside", "set_apart")
    INFO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    SET_ASIDE_FIELD_NUMBER: _ClassVar[int]
    SET_APART_FIELD_NUMBER: _ClassVar[int]
    info: _registry_pb2.WorkerInfo
    load: _registry_pb2.WorkerLoad
    heartbeat_age_seconds: float
    connected: bool
    set_aside: str
    set_apart: str
    def __init__(self, info: _Optional[_Union[_registry_pb2.WorkerInfo, _Mapping]] = ..., load: _Optional[_Union[_registry_pb2.WorkerLoad, _Mapping]] = ..., heartbeat_age_seconds: _Optional[float] = ..., connected: bool = ..., set_aside: _Optional[str] = ..., set_apart: _Optional[str] = ...) -> None: ...

class LatencySummary(_message.Message):
    __slots__ = ("name", "count", "p50_seconds", "p90_seconds", "p99_seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    P50_SECONDS_FIELD_NUMBER: _ClassVar[int]
    P90_SECONDS_FIELD_NUMBER: _ClassVar[int]
    P99_SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    count: int
    p50_seconds: float
    p90_seconds: float
    p99_seconds: float
    def __init__(self, name: _Optional[str] = ..., count: _Optional[int] = ..., p50_seconds: _Optional[float] = ..., p90_seconds: _Optional[float] = ..., p99_seconds: _Optional[float] = ...) -> None: ...

class PlacementCount(_message.Message):
    __slots__ = ("reason", "count", "text")
    REASON_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    reason: str
    count: int
    text: str
    def __init__(self, reason: _Optional[str] = ..., count: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class ReasonCount(_message.Message):
    __slots__ = ("reason", "count")
    REASON_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    reason: str
    count: int
    def __init__(self, reason: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class HandoffPair(_message.Message):
    __slots__ = ("source", "target", "count", "bytes", "median_seconds", "transport", "passed_over")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    PASSED_OVER_FIELD_NUMBER: _ClassVar[int]
    source: str
    target: str
    count: int
    bytes: int
    median_seconds: float
    transport: str
    passed_over: str
    def __init__(self, source: _Optional[str] = ..., target: _Optional[str] = ..., count: _Optional[int] = ..., bytes: _Optional[int] = ..., median_seconds: _Optional[float] = ..., transport: _Optional[str] = ..., passed_over: _Optional[str] = ...) -> None: ...

class SlowRequest(_message.Message):
    __slots__ = ("request_id", "trace_id", "outcome", "age_seconds", "total_seconds", "first_token_seconds", "prompt_tokens", "completion_tokens", "prefill", "decode")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    trace_id: str
    outcome: str
    age_seconds: float
    total_seconds: float
    first_token_seconds: float
    prompt_tokens: int
    completion_tokens: int
    prefill: str
    decode: str
    def __init__(self, request_id: _Optional[str] = ..., trace_id: _Optional[str] = ..., outcome: _Optional[str] = ..., age_seconds: _Optional[float] = ..., total_seconds: _Optional[float] = ..., first_token_seconds: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., prefill: _Optional[str] = ..., decode: _Optional[str] = ...) -> None: ...

class RecentActivity(_message.Message):
    __slots__ = ("window_seconds", "requests_per_second", "tokens_per_second", "latencies", "total_requests", "total_tokens", "placements", "prompt_tokens", "cached_tokens", "last_placements")
    WINDOW_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    LATENCIES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAST_PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    window_seconds: float
    requests_per_second: float
    tokens_per_second: float
    latencies: _containers.RepeatedCompositeFieldContainer[LatencySummary]
    total_requests: int
    total_tokens: int
    placements: _containers.RepeatedCompositeFieldContainer[PlacementCount]
    prompt_tokens: int
    cached_tokens: int
    last_placements: _containers.RepeatedCompositeFieldContainer[PlacementCount]
    def __init__(self, window_seconds: _Optional[float] = ..., requests_per_second: _Optional[float] = ..., tokens_per_second: _Optional[float] = ..., latencies: _Optional[_Iterable[_Union[LatencySummary, _Mapping]]] = ..., total_requests: _Optional[int] = ..., total_tokens: _Optional[int] = ..., placements: _Optional[_Iterable[_Union[PlacementCount, _Mapping]]] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., last_placements: _Optional[_Iterable[_Union[PlacementCount, _Mapping]]] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("model", "ready", "queued_requests", "queued_tokens", "active_requests", "workers", "not_ready_reason", "version", "uptime_seconds", "admin_address", "recent", "decisions", "handoffs", "failures", "refusals", "slow_requests")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    NOT_READY_REASON_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ADMIN_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    SLOW_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    model: str
    ready: bool
    queued_requests: int
    queued_tokens: int
    active_requests: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    not_ready_reason: str
    version: str
    uptime_seconds: float
    admin_address: str
    recent: RecentActivity
    decisions: _containers.RepeatedCompositeFieldContainer[_registry_pb2.Decision]
    handoffs: _containers.RepeatedCompositeFieldContainer[HandoffPair]
    failures: _containers.RepeatedCompositeFieldContainer[ReasonCount]
    refusals: _containers.RepeatedCompositeFieldContainer[ReasonCount]
    slow_requests: _containers.RepeatedCompositeFieldContainer[SlowRequest]
    def __init__(self, model: _Optional[str] = ..., ready: bool = ..., queued_requests: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., active_requests: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., not_ready_reason: _Optional[str] = ..., version: _Optional[str] = ..., uptime_seconds: _Optional[float] = ..., admin_address: _Optional[str] = ..., recent: _Optional[_Union[RecentActivity, _Mapping]] = ..., decisions: _Optional[_Iterable[_Union[_registry_pb2.Decision, _Mapping]]] = ..., handoffs: _Optional[_Iterable[_Union[HandoffPair, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[ReasonCount, _Mapping]]] = ..., refusals: _Optional[_Iterable[_Union[ReasonCount, _Mapping]]] = ..., slow_requests: _Optional[_Iterable[_Union[SlowRequest, _Mapping]]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
