"""The one table from exception to gRPC status, and how an exception is sent (`received_error` reads it).

A status carries google.rpc details: ErrorInfo (domain "tandem", reason, field), BadRequest
where a field is at fault, RetryInfo where waiting helps.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from shell.telemetry.logging import Logger
from tandem import errors
from tandem.errors import InternalError, Reason, TandemError
from tandem.rpc.received_error import DOMAIN

STATUS_CODES: Mapping[type[TandemError], grpc.StatusCode] = {
    errors.TandemError: grpc.StatusCode.INTERNAL,
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnsupportedOption: grpc.StatusCode.UNIMPLEMENTED,
    errors.ModelNotFound: grpc.StatusCode.NOT_FOUND,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.PrefixNotHeld: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.TransferError: grpc.StatusCode.DATA_LOSS,
    errors.HandshakeMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.CheckpointError: grpc.StatusCode.FAILED_PRECONDITION,
}
"""Statuses of classes; a class that is missing has the status of its nearest base."""
_NEED_MENDING = {Reason.UNAUTHENTICATED, Reason.TLS_FAILED, Reason.WORKER_ID_TAKEN, Reason.HANDSHAKE_MISMATCH}
_MAX_MESSAGE_BYTES = 1024
_MAX_FIELD_BYTES = 256
"""A status travels in trailers, in which message and field stand more than once, and clients take 8 KiB of them: of a
longer one they see nothing but RESOURCE_EXHAUSTED."""
_NO_RETRY = ("grpc-retry-pushback-ms", "-1")
"""Tells gRPC's own retries in clients that this process has done what could be done (gRPC proposal A6). Not so
where it drains: another one may answer."""


def status_code(error: TandemError) -> grpc.StatusCode:
    """Returns the status of the error's class."""
    return next(STATUS_CODES[cls] for cls in type(error).__mro__ if cls in STATUS_CODES)


def bug_logged(log: Logger, event: str, error: Exception, **fields: Any) -> InternalError:
    """For an exception that is being handled and is our own bug: the caller gets an id, which the log explains."""
    error_id = secrets.token_hex(6)
    log.exception(event, **fields, error_id=error_id, kind=type(error).__name__)
    return InternalError(f"internal error {error_id}")


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: TandemError) -> NoReturn:
    """Ends the call with `error`'s status and details. Raises AbortError; CancelledError where it is over already.

    A deadline that both sides see at once, or a caller that leaves, may end the call before its error is sent.
    """
    # gRPC keeps the AbortError, and so its context, until later calls: not the frames, which hold request and answer.
    error.__traceback__ = error.__cause__ = error.__context__ = None
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


def refusal(error: TandemError) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler that ends every call with `error`, whatever is asked, and reads no request."""

    async def refuse(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        del requests  # streaming both ways is the one shape that waits for nothing
        await abort_with(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


def needs_mending(error: TandemError) -> bool:
    """Whether certificates, tokens or names are at fault: trying again does not help, so somebody must be told."""
    return error.reason in _NEED_MENDING


def _to_proto(error: TandemError) -> status_pb2.Status:
    message, field = _shown(error.message, _MAX_MESSAGE_BYTES), _shown(error.field, _MAX_FIELD_BYTES)
    metadata = {"field": field} if field else {}
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.reason.value, domain=DOMAIN, metadata=metadata)]
    if isinstance(error, errors.InvalidRequest | errors.UnsupportedOption):
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, errors.Overloaded) or error.reason is Reason.MODEL_CHANGED:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(retry)
    status = status_pb2.Status(code=status_code(error).value[0], message=message)
    for detail in details:
        status.details.add().Pack(detail)
    return status


def _shown(text: str, max_bytes: int) -> str:
    """Cuts the text to valid UTF-8: the caller may have sent it."""
    raw = text.encode(errors="replace")
    return text if len(raw) <= max_bytes else f"{raw[:max_bytes].decode(errors='ignore')}…"
