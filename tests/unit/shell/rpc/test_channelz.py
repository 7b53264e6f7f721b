"""What channelz tells of the process, on its gRPC port."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc
import grpc.aio
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shell.rpc.server import RpcServer

Serve = Callable[..., Awaitable[tuple[RpcServer, grpc.aio.Channel]]]
TIMEOUT_S = 20.0


async def test_it_tells_of_the_server_and_its_connections(serve: Serve) -> None:
    _, channel = await serve()
    for _ in range(3):
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    channelz = channelz_pb2_grpc.ChannelzStub(channel)

    streams = []
    for server in (await channelz.GetServers(channelz_pb2.GetServersRequest(), timeout=TIMEOUT_S)).server:
        asked = channelz_pb2.GetServerSocketsRequest(server_id=server.ref.server_id)
        for ref in (await channelz.GetServerSockets(asked, timeout=TIMEOUT_S)).socket_ref:
            request = channelz_pb2.GetSocketRequest(socket_id=ref.socket_id)
            streams.append((await channelz.GetSocket(request, timeout=TIMEOUT_S)).socket.data.streams_started)
    assert any(started >= 3 for started in streams)


async def test_it_tells_of_channels_and_their_parts(serve: Serve) -> None:
    _, channel = await serve()
    channelz = channelz_pb2_grpc.ChannelzStub(channel)
    await channelz.GetServers(channelz_pb2.GetServersRequest(), timeout=TIMEOUT_S)

    (own, *_) = (await channelz.GetTopChannels(channelz_pb2.GetTopChannelsRequest(), timeout=TIMEOUT_S)).channel
    one = channelz_pb2.GetChannelRequest(channel_id=own.ref.channel_id)
    assert (await channelz.GetChannel(one, timeout=TIMEOUT_S)).channel.data.target == own.data.target


@pytest.mark.parametrize("method", ["GetServer", "GetChannel", "GetSubchannel", "GetSocket"])
async def test_an_unknown_id_is_not_found(serve: Serve, method: str) -> None:
    _, channel = await serve()
    request = getattr(channelz_pb2, f"{method}Request")()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await getattr(channelz_pb2_grpc.ChannelzStub(channel), method)(request, timeout=TIMEOUT_S)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
