"""The exception that a gRPC status stands for: what the other side raised, or what gRPC itself met.

`shell.rpc.status` is the other direction. Nothing here needs more than grpcio and protobuf: clients read it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc
import grpc.aio
from google.protobuf import message

from tandem.errors import Reason, TandemError, rebuild_error
from tandem.rpc.google_messages import ErrorInfo, RetryInfo, Status, unpacked
from tandem.rpc.tls import tls_failure

DOMAIN = "tandem"
"""Domain of Tandem's ErrorInfo."""
_DETAILS_KEY = "grpc-status-details-bin"
_REASON_OF_CODE: Mapping[grpc.StatusCode, Reason] = {
    grpc.StatusCode.INVALID_ARGUMENT: Reason.INVALID_FIELD,
    grpc.StatusCode.OUT_OF_RANGE: Reason.INVALID_FIELD,
    grpc.StatusCode.UNIMPLEMENTED: Reason.OPTION_NOT_SUPPORTED,
    grpc.StatusCode.NOT_FOUND: Reason.MODEL_NOT_FOUND,
    grpc.StatusCode.UNAUTHENTICATED: Reason.UNAUTHENTICATED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Reason.QUEUE_FULL,
    grpc.StatusCode.UNAVAILABLE: Reason.WORKER_LOST,
    grpc.StatusCode.CANCELLED: Reason.WORKER_LOST,
    grpc.StatusCode.DEADLINE_EXCEEDED: Reason.DEADLINE_EXCEEDED,
    grpc.StatusCode.DATA_LOSS: Reason.TRANSFER_FAILED,
}
"""For statuses without ErrorInfo, which gRPC itself makes."""


def error_from_rpc(error: grpc.RpcError) -> TandemError:
    """The error that the other side raised, of the same class; a gRPC failure by its code."""
    try:
        raised = _of_details(error)
    except message.DecodeError:
        raised = None
    return raised or _of_grpc_itself(error.code(), error.details() or "no details")


def _of_details(error: grpc.RpcError) -> TandemError | None:
    """From google.rpc details with our ErrorInfo; None without. Raises DecodeError."""
    metadata: Any = error.trailing_metadata() or ()
    packed = next((value for key, value in metadata if key == _DETAILS_KEY and isinstance(value, bytes)), b"")
    status = Status.FromString(packed)
    info = unpacked(status.details, ErrorInfo)
    if info is None or info.domain != DOMAIN:
        return None
    retry = unpacked(status.details, RetryInfo)
    retry_after_s = 1.0 if retry is None else retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    told = {each.key: each.value for each in info.metadata}
    return rebuild_error(info.reason, status.message, field=told.get("field", ""), retry_after_s=retry_after_s)


def _of_grpc_itself(code: grpc.StatusCode, details: str) -> TandemError:
    """From a status that no handler of ours made."""
    if code is grpc.StatusCode.UNAVAILABLE:
        why = tls_failure(details)
        if why is not None:
            return rebuild_error(Reason.TLS_FAILED, f"{code.name}: {why} ({details})")
        if "Socket closed" in details:  # before an answer
            details += "; does the server want TLS (--tls-ca), or a certificate of the caller (--tls-cert, --tls-key)?"
        if "Connection refused" in details:
            details += "; nobody listens there: start `tandem serve`, or name its address by --target"
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:  # the same message always is
        return rebuild_error(Reason.INVALID_FIELD, f"{code.name}: {details}", field="message")
    return rebuild_error(_REASON_OF_CODE.get(code, Reason.INTERNAL), f"{code.name}: {details}")
