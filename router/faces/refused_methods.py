"""Methods of a foreign service that Tandem does not have: answered UNIMPLEMENTED with the reason.

They are not in our protos, so reflection does not list what is not offered. gRPC alone would say
no more than "Method not found".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc
import grpc.aio

from tandem.errors import UnsupportedOption


def refuse_methods(server: grpc.aio.Server, service_name: str, reasons: Mapping[str, str]) -> None:
    """Answers each method in `reasons` with its reason. Streams of responses too: an error needs none."""
    handlers = {method: _refusal(method, reason) for method, reason in reasons.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service_name, handlers),))


def _refusal(method: str, reason: str) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        raise UnsupportedOption(method, reason)

    return grpc.unary_unary_rpc_method_handler(refuse)
