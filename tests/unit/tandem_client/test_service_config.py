from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc.aio
import pytest

from shell.rpc.server import RpcServer, Service
from tandem.client import AsyncClient
from tandem.errors import Reason, Unavailable
from tandem.v1 import inference_pb2, inference_pb2_grpc

CALLS = 20


class Router(inference_pb2_grpc.InferenceServiceServicer):
    """Says its name as the model's, or the first few times that it is unavailable."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_calls = 0
        self.refusals = 0
        self.reason = Reason.DRAINING
        self.cancels = 0

    async def GetModel(  # noqa: N802
        self, request: inference_pb2.GetModelRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.GetModelResponse:
        self.num_calls += 1
        if self.num_calls <= self.refusals:
            raise Unavailable("not now", self.reason)
        if self.num_calls <= self.cancels:
            await context.abort(grpc.StatusCode.CANCELLED)
        return inference_pb2.GetModelResponse(model=self.name)


class Routers:
    """Two of them on loopback."""

    def __init__(self, servers: list[RpcServer], routers: list[Router], ports: list[int]) -> None:
        self.servers = servers
        self.routers = routers
        self.targets = [f"127.0.0.1:{port}" for port in ports]


@pytest.fixture
async def pair() -> AsyncIterator[Routers]:
    async with AsyncExitStack() as stack:
        servers, routers, ports = [], [Router("a"), Router("b")], []
        for router in routers:

            def register(server: grpc.aio.Server, router: Router = router) -> None:
                inference_pb2_grpc.add_InferenceServiceServicer_to_server(router, server)

            server = RpcServer("127.0.0.1:0", [Service("tandem.v1.InferenceService", register)], announce_s=0)
            ports.append(await server.start())
            server.set_serving(True)
            stack.push_async_callback(server.drain, 0)
            servers.append(server)
        yield Routers(servers, routers, ports)


async def test_calls_are_spread_over_all_routers(pair: Routers) -> None:
    async with AsyncClient(f"ipv4:{','.join(pair.targets)}") as client:
        for _ in range(CALLS):
            await client.model()

    assert all(router.num_calls for router in pair.routers)


async def test_a_router_that_does_not_serve_is_not_called_while_another_does(pair: Routers) -> None:
    pair.servers[0].set_serving(False)

    async with AsyncClient(f"ipv4:{','.join(pair.targets)}") as client:
        models = {(await client.model()).model for _ in range(CALLS)}

    assert models == {"b"}
    assert pair.routers[0].num_calls == 0


async def test_a_single_router_is_asked_even_if_it_does_not_serve(pair: Routers) -> None:
    pair.servers[0].set_serving(False)

    async with AsyncClient(pair.targets[0]) as client:
        assert (await client.model()).model == "a"


async def test_a_call_that_a_draining_router_refused_is_sent_again(pair: Routers) -> None:
    pair.routers[0].refusals = 2

    async with AsyncClient(pair.targets[0]) as client:
        assert (await client.model()).model == "a"

    assert pair.routers[0].num_calls == 3


async def test_a_call_that_crosses_the_goaway_of_a_router_is_sent_again(pair: Routers) -> None:
    pair.routers[0].cancels = 1

    async with AsyncClient(pair.targets[0]) as client:
        assert (await client.model()).model == "a"

    assert pair.routers[0].num_calls == 2


async def test_a_call_that_no_worker_can_serve_is_not_sent_again(pair: Routers) -> None:
    pair.routers[0].refusals, pair.routers[0].reason = 2, Reason.NO_CAPABLE_WORKER

    async with AsyncClient(pair.targets[0]) as client:
        with pytest.raises(Unavailable, match="not now"):
            await client.model()

    assert pair.routers[0].num_calls == 1
