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
    __slots__ = ("info", "load", "heartbeat_age_seconds", "connected")
    INFO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    info: _registry_pb2.WorkerInfo
    load: _registry_pb2.WorkerLoad
    heartbeat_age_seconds: float
    connected: bool
    def __init__(self, info: _Optional[_Union[_registry_pb2.WorkerInfo, _Mapping]] = ..., load: _Optional[_Union[_registry_pb2.WorkerLoad, _Mapping]] = ..., heartbeat_age_seconds: _Optional[float] = ..., connected: bool = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("model", "ready", "queued_requests", "queued_tokens", "active_requests", "workers", "not_ready_reason")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    NOT_READY_REASON_FIELD_NUMBER: _ClassVar[int]
    model: str
    ready: bool
    queued_requests: int
    queued_tokens: int
    active_requests: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    not_ready_reason: str
    def __init__(self, model: _Optional[str] = ..., ready: bool = ..., queued_requests: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., active_requests: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., not_ready_reason: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
