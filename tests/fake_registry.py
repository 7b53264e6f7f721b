"""A router as workers see it: a RegistryService that takes in whoever comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.support.ports import free_ports
from shell.rpc.server import RpcServer, Service
from tandem.v1 import registry_pb2, registry_pb2_grpc

TIMEOUT_S = 10


class Registry(registry_pb2_grpc.RegistryServiceServicer):
    """Collects what workers say; `answers` are sent on each new stream."""

    def __init__(self, lease_s: float = 0.05) -> None:
        self.answers = [registry_pb2.RegisterResponse(lease_seconds=lease_s)]
        self.said: asyncio.Queue[registry_pb2.RegisterRequest] = asyncio.Queue()
        self.num_streams = 0
        self.hang_up = asyncio.Event()
        self.hung_up = asyncio.Event()
        self.code = grpc.StatusCode.OK
        """That a stream ends with when this hangs up."""

    async def Register(  # noqa: N802
        self,
        request_iterator: AsyncIterator[registry_pb2.RegisterRequest],
        context: grpc.aio.ServicerContext[registry_pb2.RegisterRequest, registry_pb2.RegisterResponse],
    ) -> None:
        self.num_streams += 1
        for answer in self.answers:
            await context.write(answer)
        reading = asyncio.create_task(self._read(request_iterator))
        hanging_up = asyncio.create_task(self.hang_up.wait())
        try:
            await asyncio.wait({reading, hanging_up}, return_when=asyncio.FIRST_COMPLETED)
            self.hang_up.clear()
            self.hung_up.set()
        finally:
            reading.cancel()
            hanging_up.cancel()
        if self.code is not grpc.StatusCode.OK:
            await context.abort(self.code)

    async def _read(self, requests: AsyncIterator[registry_pb2.RegisterRequest]) -> None:
        async for request in requests:
            self.said.put_nowait(request)

    async def hear(self) -> registry_pb2.RegisterRequest:
        return await asyncio.wait_for(self.said.get(), TIMEOUT_S)

    @property
    def service(self) -> Service:
        return Service(
            "tandem.v1.RegistryService",
            lambda server: registry_pb2_grpc.add_RegistryServiceServicer_to_server(self, server),
            long_lived=True,
        )


@asynccontextmanager
async def listening() -> AsyncIterator[str]:
    """The address of one that takes in whoever comes, until the block ends."""
    server, port = await listen(Registry(lease_s=TIMEOUT_S))
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.drain(0)


async def becomes_ready(address: str, timeout_s: float) -> None:
    """Returns once the process there says SERVING. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s), grpc.aio.insecure_channel(address) as channel:
        async for message in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
            if message.status == health_pb2.HealthCheckResponse.SERVING:
                return


async def listen(registry: Registry, port: int = 0, host: str = "127.0.0.1") -> tuple[RpcServer, int]:
    """Serves it until drained, at a port that stays free for a next life; returns the port, too."""
    server = RpcServer(f"{host}:{port or free_ports(1)[0]}", [registry.service], announce_s=0)
    return server, await server.start()
