"""grpc.channelz.v1: the process's own gRPC servers, channels and sockets, as gRPC's core tells of them.

Unlike the servicer of grpcio-channelz, whose messages these are, it leaves out what the core tells beyond
them: a core that is newer than the messages would otherwise make whole calls fail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf import json_format
from google.protobuf.message import Message
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # where grpcio-channelz asks, too: there is no other door
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc

SERVICE_NAME = "grpc.channelz.v1.Channelz"

Context = grpc.aio.ServicerContext[Any, Any]
Response = TypeVar("Response", bound=Message)


class ChannelzServicer(channelz_pb2_grpc.ChannelzServicer):  # type: ignore[misc]  # has no types
    """Answers at once: the core only copies counters."""

    async def GetTopChannels(self, request: Any, context: Context) -> Any:  # noqa: N802
        """The channels to other processes, from a given id on."""
        found = channelz_pb2.GetTopChannelsResponse()
        return await _told(context, found, lambda: cygrpc.channelz_get_top_channels(request.start_channel_id))

    async def GetServers(self, request: Any, context: Context) -> Any:  # noqa: N802
        """The servers of this process, from a given id on."""
        found = channelz_pb2.GetServersResponse()
        return await _told(context, found, lambda: cygrpc.channelz_get_servers(request.start_server_id))

    async def GetServer(self, request: Any, context: Context) -> Any:  # noqa: N802
        """One server."""
        found = channelz_pb2.GetServerResponse()
        return await _told(context, found, lambda: cygrpc.channelz_get_server(request.server_id))

    async def GetServerSockets(self, request: Any, context: Context) -> Any:  # noqa: N802
        """The connections of one server."""
        asked = (request.server_id, request.start_socket_id, request.max_results)
        found = channelz_pb2.GetServerSocketsResponse()
        return await _told(context, found, lambda: cygrpc.channelz_get_server_sockets(*asked))

    async def GetChannel(self, request: Any, context: Context) -> Any:  # noqa: N802
        """One channel."""
        found = channelz_pb2.GetChannelResponse()
        return await _told(context, found, lambda: cygrpc.channelz_get_channel(request.channel_id))

    async def GetSubchannel(self, request: Any, context: Context) -> Any:  # noqa: N802
        """One address of a channel."""
        found = channelz_pb2.GetSubchannelResponse()
        return await _told(context, found, lambda: cygrpc.channelz_get_subchannel(request.subchannel_id))

    async def GetSocket(self, request: Any, context: Context) -> Any:  # noqa: N802
        """One connection."""
        found = channelz_pb2.GetSocketResponse()
        return await _told(context, found, lambda: cygrpc.channelz_get_socket(request.socket_id))


async def _told(context: Context, found: Response, ask: Callable[[], bytes]) -> Response:
    """What the core says, in `found`; NOT_FOUND for an id that it does not know."""
    try:
        said = ask()
    except ValueError as error:
        await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
    return json_format.Parse(said, found, ignore_unknown_fields=True)
