"""grpc.channelz.v1: the process's own gRPC servers, channels and sockets, as gRPC's core reports them.

grpcio-channelz has the messages; its servicer fails on fields that a newer core reports beyond them. Here those
are left out. Handlers answer at once: the core only copies counters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import grpc
import grpc.aio
from google.protobuf import json_format
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # the only access to it; grpcio-channelz uses it, too
from grpc_channelz.v1 import channelz_pb2

from shell.rpc.handlers import Context, Handler

SERVICE_NAME = "grpc.channelz.v1.Channelz"

_METHODS: Mapping[str, tuple[Callable[..., bytes], tuple[str, ...]]] = {
    "GetTopChannels": (cygrpc.channelz_get_top_channels, ("start_channel_id",)),
    "GetServers": (cygrpc.channelz_get_servers, ("start_server_id",)),
    "GetServer": (cygrpc.channelz_get_server, ("server_id",)),
    "GetServerSockets": (cygrpc.channelz_get_server_sockets, ("server_id", "start_socket_id", "max_results")),
    "GetChannel": (cygrpc.channelz_get_channel, ("channel_id",)),
    "GetSubchannel": (cygrpc.channelz_get_subchannel, ("subchannel_id",)),
    "GetSocket": (cygrpc.channelz_get_socket, ("socket_id",)),
}
"""The core's function for each method, and the fields of the request that are its arguments."""


def add_channelz(server: grpc.aio.Server) -> None:
    """Adds the service to the server."""
    handlers = {name: _handler(name, *method) for name, method in _METHODS.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))


def _handler(name: str, ask: Callable[..., bytes], fields: tuple[str, ...]) -> Handler:
    response_class: Any = getattr(channelz_pb2, f"{name}Response")

    async def answer(request: Any, context: Context) -> Any:
        try:
            told = ask(*(getattr(request, field) for field in fields))
        except ValueError as error:  # an id that the core does not know
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        return json_format.Parse(told, response_class(), ignore_unknown_fields=True)

    return grpc.unary_unary_rpc_method_handler(
        answer,
        request_deserializer=getattr(channelz_pb2, f"{name}Request").FromString,
        response_serializer=response_class.SerializeToString,
    )
