"""gRPC handlers as interceptors need them: a handler's function, the same handler around another, how a call ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import grpc
import grpc.aio

from shell.clock import ended_by_deadline

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"
"""What an interceptor calls to get the handler from those further inside; None = there is no such method."""


def behaviour_of(handler: Handler) -> Any:
    """Returns the function that the handler has, of the four possible."""
    return handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream


def with_behaviour(handler: Handler, behaviour: Any, *, streams: bool, request_deserializer: Any) -> Handler:
    """Returns a handler that takes a stream of requests; `streams`: whether it writes its responses itself."""
    make = grpc.stream_stream_rpc_method_handler if streams else grpc.stream_unary_rpc_method_handler
    return make(behaviour, request_deserializer=request_deserializer, response_serializer=handler.response_serializer)


async def write_whole(context: Context, response: Any) -> None:
    """Writes; a cancellation takes effect when the message is out, or the call over.

    For tasks that are cancelled while their call goes on: gRPC's `write` that is cancelled on the way does not note
    that the call's metadata is sent. It then fails to send a status with it, and the caller would wait for ever.
    """
    writing = asyncio.ensure_future(context.write(response))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait({writing})
        raise


@contextmanager
def telling_end(context: Context, tell: Callable[[grpc.StatusCode], None]) -> Iterator[None]:
    """Calls `tell` once, with the status that the call inside ended with; UNKNOWN where its handler has a bug."""
    began_s = time.monotonic()
    code = grpc.StatusCode.UNKNOWN
    try:
        yield
        code = _code_told(context)
    except grpc.aio.AbortError:
        code = _code_told(context)
        raise
    except asyncio.CancelledError:
        late = ended_by_deadline(time.monotonic() - began_s, context.time_remaining())
        code = grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
        raise
    finally:
        tell(code)


def _code_told(context: Context) -> grpc.StatusCode:
    """The status that the handler set, by setting it or by aborting; none = OK."""
    code: Any = context.code()
    if code is None:
        return grpc.StatusCode.OK
    return code if isinstance(code, grpc.StatusCode) else _CODES.get(code, grpc.StatusCode.UNKNOWN)


_CODES = {code.value[0]: code for code in grpc.StatusCode}
