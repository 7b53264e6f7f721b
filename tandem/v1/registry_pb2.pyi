from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_PREFILL: _ClassVar[WorkerRole]
    WORKER_ROLE_DECODE: _ClassVar[WorkerRole]
    WORKER_ROLE_ELASTIC: _ClassVar[WorkerRole]
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_PREFILL: WorkerRole
WORKER_ROLE_DECODE: WorkerRole
WORKER_ROLE_ELASTIC: WorkerRole

class Decision(_message.Message):
    __slots__ = ("name", "value", "why", "force")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    why: str
    force: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ..., why: _Optional[str] = ..., force: _Optional[str] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("worker_id", "incarnation", "role", "address", "model", "config_fingerprint", "model_fingerprint", "layout_fingerprint", "transports", "local_prefill_tokens", "max_sequence_tokens", "pid", "device", "admin_address", "pool_tokens", "max_seqs", "decisions")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ADMIN_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    POOL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQS_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    role: WorkerRole
    address: str
    model: str
    config_fingerprint: str
    model_fingerprint: str
    layout_fingerprint: str
    transports: _containers.RepeatedScalarFieldContainer[str]
    local_prefill_tokens: int
    max_sequence_tokens: int
    pid: int
    device: str
    admin_address: str
    pool_tokens: int
    max_seqs: int
    decisions: _containers.RepeatedCompositeFieldContainer[Decision]
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[_Union[WorkerRole, str]] = ..., address: _Optional[str] = ..., model: _Optional[str] = ..., config_fingerprint: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., layout_fingerprint: _Optional[str] = ..., transports: _Optional[_Iterable[str]] = ..., local_prefill_tokens: _Optional[int] = ..., max_sequence_tokens: _Optional[int] = ..., pid: _Optional[int] = ..., device: _Optional[str] = ..., admin_address: _Optional[str] = ..., pool_tokens: _Optional[int] = ..., max_seqs: _Optional[int] = ..., decisions: _Optional[_Iterable[_Union[Decision, _Mapping]]] = ...) -> None: ...

class PoolStatus(_message.Message):
    __slots__ = ("total_blocks", "free_blocks", "reserved_blocks", "receiving_blocks", "live_blocks", "quarantined_blocks", "block_size", "unused_slots", "cached_blocks")
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RECEIVING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LIVE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    UNUSED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    total_blocks: int
    free_blocks: int
    reserved_blocks: int
    receiving_blocks: int
    live_blocks: int
    quarantined_blocks: int
    block_size: int
    unused_slots: int
    cached_blocks: int
    def __init__(self, total_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., reserved_blocks: _Optional[int] = ..., receiving_blocks: _Optional[int] = ..., live_blocks: _Optional[int] = ..., quarantined_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., unused_slots: _Optional[int] = ..., cached_blocks: _Optional[int] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("engine_steps", "running_seqs", "waiting_seqs", "queued_prompt_tokens", "pool", "live_transfers", "draining", "preemptions", "prompt_tokens_per_second", "step_seconds", "step_objective_seconds", "running_for_others", "waiting_for_others", "steps_per_second", "chunk_tokens", "device_used_bytes", "device_total_bytes")
    ENGINE_STEPS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SEQS_FIELD_NUMBER: _ClassVar[int]
    WAITING_SEQS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    LIVE_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEP_OBJECTIVE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FOR_OTHERS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_OTHERS_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    engine_steps: int
    running_seqs: int
    waiting_seqs: int
    queued_prompt_tokens: int
    pool: PoolStatus
    live_transfers: int
    draining: bool
    preemptions: int
    prompt_tokens_per_second: float
    step_seconds: float
    step_objective_seconds: float
    running_for_others: int
    waiting_for_others: int
    steps_per_second: float
    chunk_tokens: int
    device_used_bytes: int
    device_total_bytes: int
    def __init__(self, engine_steps: _Optional[int] = ..., running_seqs: _Optional[int] = ..., waiting_seqs: _Optional[int] = ..., queued_prompt_tokens: _Optional[int] = ..., pool: _Optional[_Union[PoolStatus, _Mapping]] = ..., live_transfers: _Optional[int] = ..., draining: bool = ..., preemptions: _Optional[int] = ..., prompt_tokens_per_second: _Optional[float] = ..., step_seconds: _Optional[float] = ..., step_objective_seconds: _Optional[float] = ..., running_for_others: _Optional[int] = ..., waiting_for_others: _Optional[int] = ..., steps_per_second: _Optional[float] = ..., chunk_tokens: _Optional[int] = ..., device_used_bytes: _Optional[int] = ..., device_total_bytes: _Optional[int] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("info", "load")
    INFO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    info: WorkerInfo
    load: WorkerLoad
    def __init__(self, info: _Optional[_Union[WorkerInfo, _Mapping]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("lease_seconds", "drain", "heartbeat_seconds", "set_apart")
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SET_APART_FIELD_NUMBER: _ClassVar[int]
    lease_seconds: float
    drain: bool
    heartbeat_seconds: float
    set_apart: str
    def __init__(self, lease_seconds: _Optional[float] = ..., drain: bool = ..., heartbeat_seconds: _Optional[float] = ..., set_apart: _Optional[str] = ...) -> None: ...
