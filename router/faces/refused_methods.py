"""A foreign service, and its methods that Tandem does not have: answered UNIMPLEMENTED with the reason.

They are not in our protos, so reflection does not list what is not offered. gRPC alone would say
no more than "Method not found".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import grpc
import grpc.aio

from shell.rpc.server import Service
from tandem.errors import UnsupportedOption


def partial_service(
    name: str,
    add_offered: Callable[[grpc.aio.Server], None],
    refused: Mapping[str, str],
    probes: tuple[str, ...] = (),
) -> Service:
    """`refused`: reason by method. Streams of responses may be among them: an error needs none."""

    def register(server: grpc.aio.Server) -> None:
        add_offered(server)
        handlers = {method: _refusal(method, reason) for method, reason in refused.items()}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))

    return Service(name, register, probes=probes)


def _refusal(method: str, reason: str) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        raise UnsupportedOption(method, reason)

    return grpc.unary_unary_rpc_method_handler(refuse)
