"""What clients that stay connected see of a server's drain, behind one address for several servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import grpc.aio

from shell.rpc.server import RpcServer, Service
from tandem.rpc.channel import open_channel
from tandem.v1 import inference_pb2, inference_pb2_grpc

TIMEOUT_S = 30


class Named(inference_pb2_grpc.InferenceServiceServicer):
    """Says its name; streams from it until they may end."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.may_end = asyncio.Event()

    async def GetModel(  # noqa: N802
        self, request: inference_pb2.GetModelRequest, context: object
    ) -> inference_pb2.GetModelResponse:
        return inference_pb2.GetModelResponse(model=self.name)

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        yield inference_pb2.GenerateResponse(text="first")
        await self.may_end.wait()
        yield inference_pb2.GenerateResponse(text="last")

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[tuple[RpcServer, int]]:
        def register(server: grpc.aio.Server) -> None:
            inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, server)

        server = RpcServer("127.0.0.1:0", [Service("tandem.v1.InferenceService", register)], announce_s=0)
        port = await server.start()
        try:
            yield server, port
        finally:
            await server.drain(0)


class Forwarder:
    """One address before several servers: passes each new connection on to `port`; open ones stay where they are."""

    def __init__(self, port: int) -> None:
        self.port = port

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        yield "{}:{}".format(*server.sockets[0].getsockname())
        server.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.port)
        await asyncio.gather(_pass_on(reader, there_writer), _pass_on(there_reader, writer))


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
    except ConnectionError:
        pass  # as good as its end
    writer.close()


async def test_a_draining_server_is_alive_and_its_client_calls_elsewhere_while_its_stream_goes_on() -> None:
    old, new = Named("old"), Named("new")
    async with AsyncExitStack() as stack, asyncio.timeout(TIMEOUT_S):
        server, port = await stack.enter_async_context(old.listening())
        _, new_port = await stack.enter_async_context(new.listening())
        forwarder = Forwarder(port)
        channel = open_channel(await stack.enter_async_context(forwarder.listening()))
        stack.push_async_callback(channel.close)
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        stream = stub.Generate(inference_pb2.GenerateRequest())
        await stream.read()
        forwarder.port = new_port

        draining = asyncio.create_task(server.drain(TIMEOUT_S))
        await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        assert (await stub.GetModel(inference_pb2.GetModelRequest())).model == "new"
        assert (server.health.alive, server.health.serving) == (True, False)  # no probe ends it under its streams

        old.may_end.set()
        assert (await stream.read()).text == "last"
        assert await stream.code() is grpc.StatusCode.OK
        await draining


async def test_what_is_left_is_refused_only_after_clients_were_told_to_call_elsewhere() -> None:
    refused = asyncio.Event()
    async with AsyncExitStack() as stack, asyncio.timeout(TIMEOUT_S):
        server, port = await stack.enter_async_context(Named("old").listening())
        channel = open_channel(f"127.0.0.1:{port}")
        stack.push_async_callback(channel.close)
        stream = inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest())
        await stream.read()

        draining = asyncio.create_task(server.drain(TIMEOUT_S, refused.set))
        await refused.wait()

        assert not draining.done()
        await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        stream.cancel()
        await draining


async def _end_under_a_stuck_call() -> None:
    async with Named("stuck").listening() as (server, port), open_channel(f"127.0.0.1:{port}") as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest())
        await call.read()
        await server.drain(0)
        assert await call.code() is not grpc.StatusCode.OK


async def test_calls_cut_at_the_end_of_a_drain_do_not_bring_the_process_down() -> None:
    """gRPC does not survive two of its stops that run out of time within a moment of each other."""
    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
        for _ in range(100):
            group.create_task(_end_under_a_stuck_call())
