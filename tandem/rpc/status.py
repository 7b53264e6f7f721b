"""The one table from exception to gRPC status, and both ways across the wire.

A status carries google.rpc details: ErrorInfo (domain "tandem", reason, field), BadRequest
where a field is at fault, RetryInfo where waiting helps.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2, message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from tandem import errors
from tandem.errors import InternalError, Reason, TandemError, rebuild_error
from tandem.rpc.tls import closed_early, tls_failure
from tandem.telemetry.logging import Logger

DOMAIN = "tandem"
_DETAILS_KEY = "grpc-status-details-bin"

STATUS_CODES: Mapping[type[TandemError], grpc.StatusCode] = MappingProxyType(
    {
        errors.TandemError: grpc.StatusCode.INTERNAL,
        errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
        errors.UnsupportedOption: grpc.StatusCode.UNIMPLEMENTED,
        errors.ModelNotFound: grpc.StatusCode.NOT_FOUND,
        errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
        errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
        errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
        errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
        errors.TransferError: grpc.StatusCode.DATA_LOSS,
        errors.TicketRefused: grpc.StatusCode.DATA_LOSS,
        errors.ChecksumMismatch: grpc.StatusCode.DATA_LOSS,
        errors.HandshakeMismatch: grpc.StatusCode.FAILED_PRECONDITION,
        errors.FrameError: grpc.StatusCode.DATA_LOSS,
        errors.PeerLost: grpc.StatusCode.DATA_LOSS,
        errors.ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
        errors.CheckpointError: grpc.StatusCode.FAILED_PRECONDITION,
        errors.InternalError: grpc.StatusCode.INTERNAL,
    }
)
_NO_RETRY = ("grpc-retry-pushback-ms", "-1")
"""Tells gRPC's own retries in clients that this process has done what could be done (gRPC proposal A6). Not so
where it drains: another one may answer."""
_REASON_OF_CODE: Mapping[grpc.StatusCode, Reason] = MappingProxyType(
    {
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
)
"""For statuses without ErrorInfo, which gRPC itself makes."""


def status_code(error: TandemError) -> grpc.StatusCode:
    """By the error's class, else its nearest base in the table."""
    return next(STATUS_CODES[cls] for cls in type(error).__mro__ if cls in STATUS_CODES)


def bug_logged(log: Logger, event: str, error: Exception, **fields: object) -> InternalError:
    """For an exception that is being handled and is our own bug: the caller gets an id, which the log explains."""
    error_id = secrets.token_hex(6)
    log.exception(event, **fields, error_id=error_id, kind=type(error).__name__)
    return InternalError(f"internal error {error_id}")


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: TandemError) -> NoReturn:
    """Ends the call with `error`'s status and details. Raises AbortError; CancelledError where it is over already.

    A deadline that both sides see at once, or a caller that leaves, may end the call before its error is sent.
    """
    status = rpc_status.to_status(_to_proto(error))
    trailers = status.trailing_metadata
    if error.reason is not Reason.DRAINING:
        trailers = (*trailers, _NO_RETRY)
    try:
        await context.abort(status.code, status.details, trailers)
    except grpc.aio.AbortError:
        raise
    except grpc.aio.BaseError as gone:  # it could not be sent
        raise asyncio.CancelledError from gone


def error_from_rpc(error: grpc.aio.AioRpcError) -> TandemError:
    """The error that the other side raised, of the same class; a gRPC failure by its code."""
    status = _details_of(error)
    if status is not None:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        found = [detail for detail in status.details if detail.Is(info.DESCRIPTOR) and detail.Unpack(info)]
        waits = [detail for detail in status.details if detail.Is(retry.DESCRIPTOR) and detail.Unpack(retry)]
        if found and info.domain == DOMAIN:
            retry_after_s = retry.retry_delay.ToTimedelta().total_seconds() if waits else 1.0
            return rebuild_error(
                info.reason, status.message, field=info.metadata.get("field", ""), retry_after_s=retry_after_s
            )
    return _of_grpc_itself(error.code(), error.details() or "no details")


def needs_mending(error: TandemError) -> bool:
    """Whether certificates or tokens are at fault: trying again does not help, so somebody must be told."""
    return error.reason in {Reason.UNAUTHENTICATED, Reason.TLS_FAILED}


def _of_grpc_itself(code: grpc.StatusCode, details: str) -> TandemError:
    """From a status that no handler of ours made."""
    if code is grpc.StatusCode.UNAVAILABLE:
        why = tls_failure(details)
        if why is not None:
            return rebuild_error(Reason.TLS_FAILED, f"{code.name}: {why} ({details})")
        if closed_early(details):
            details += "; does the server want TLS, or a certificate of the caller?"
    return rebuild_error(_REASON_OF_CODE.get(code, Reason.INTERNAL), f"{code.name}: {details}")


def _to_proto(error: TandemError) -> status_pb2.Status:
    field = getattr(error, "field", getattr(error, "option", ""))
    details: list[message.Message] = [
        error_details_pb2.ErrorInfo(
            reason=error.reason.value, domain=DOMAIN, metadata={"field": field} if field else {}
        )
    ]
    if isinstance(error, errors.InvalidRequest | errors.UnsupportedOption):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, errors.Overloaded):
        details.append(error_details_pb2.RetryInfo(retry_delay=_duration(error.retry_after_s)))
    return status_pb2.Status(
        code=status_code(error).value[0], message=error.message, details=[_packed(detail) for detail in details]
    )


def _packed(detail: message.Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def _duration(seconds: float) -> duration_pb2.Duration:
    whole = math.floor(seconds)
    return duration_pb2.Duration(seconds=whole, nanos=int((seconds - whole) * 1e9))


def _details_of(error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except message.DecodeError:
                return None
    return None
