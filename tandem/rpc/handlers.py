"""gRPC handlers as interceptors see them: what one does, one that does something around it, how a call ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


def behaviour_of(handler: Handler) -> Any:
    """The one of its four functions that is set."""
    return handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream


def with_behaviour(handler: Handler, behaviour: Any) -> Handler:
    """The same handler, doing this."""
    make = _MAKERS[(bool(handler.request_streaming), bool(handler.response_streaming))]
    return make(
        behaviour,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def code_told(context: Context) -> grpc.StatusCode:
    """The status that the handler set, by setting it or by aborting; none = OK."""
    code: Any = context.code()
    if code is None:
        return grpc.StatusCode.OK
    return code if isinstance(code, grpc.StatusCode) else _CODES.get(code, grpc.StatusCode.UNKNOWN)


_CODES = {code.value[0]: code for code in grpc.StatusCode}
_MAKERS: dict[tuple[bool, bool], Callable[..., Handler]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
