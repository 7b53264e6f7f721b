from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from tandem.convert import info_from_proto, load_from_proto
from tandem.rpc.announcer import Announcer
from tandem.rpc.server import RpcServer, Service
from tandem.types import Incarnation, PoolCounts, Role, WorkerId, WorkerInfo, WorkerLoad
from tandem.v1 import registry_pb2, registry_pb2_grpc

Serve = Callable[..., Awaitable[tuple[RpcServer, grpc.aio.Channel]]]

TIMEOUT_S = 5
INFO = WorkerInfo(
    worker_id=WorkerId("decode-0"),
    incarnation=Incarnation("life"),
    role=Role.DECODE,
    address="127.0.0.1:1",
    model="demo",
    config_fingerprint="c",
    model_fingerprint="m",
    layout_fingerprint="l",
    transports=("shm",),
    local_prefill_tokens=0,
    max_sequence_tokens=64,
    pid=1,
    device="cpu",
)


class Registry(registry_pb2_grpc.RegistryServiceServicer):
    """Collects what workers say; `answers` are sent on each new stream."""

    def __init__(self, lease_s: float = 0.05) -> None:
        self.answers = [registry_pb2.RegisterResponse(lease_seconds=lease_s)]
        self.said: asyncio.Queue[registry_pb2.RegisterRequest] = asyncio.Queue()
        self.num_streams = 0
        self.hang_up = asyncio.Event()

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
        finally:
            reading.cancel()
            hanging_up.cancel()

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


class Worker:
    """A load that counts how often it was asked, and a drain that is noted."""

    def __init__(self) -> None:
        self.engine_steps = 0
        self.drained = asyncio.Event()

    def load(self) -> WorkerLoad:
        self.engine_steps += 1
        pool = PoolCounts(
            total=8, free=8, reserved=0, receiving=0, live=0, quarantined=0, block_size=16, unused_slots=0
        )
        return WorkerLoad(
            engine_steps=self.engine_steps,
            running_seqs=0,
            waiting_seqs=0,
            queued_prompt_tokens=0,
            pool=pool,
            live_transfers=0,
            draining=self.drained.is_set(),
        )


@asynccontextmanager
async def announcing(worker: Worker, *routers: str) -> AsyncIterator[Announcer]:
    announcer = Announcer(routers, INFO, worker.load, worker.drained.set, resolve_every_s=0.01)
    task = asyncio.create_task(announcer.run())
    try:
        yield announcer
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def listen(registry: Registry, port: int = 0) -> tuple[RpcServer, int]:
    server = RpcServer(f"127.0.0.1:{port}", [registry.service], announce_s=0)
    return server, await server.start()


async def test_info_comes_first_and_heartbeats_follow_with_fresh_loads() -> None:
    registry = Registry()
    server, port = await listen(registry)
    async with announcing(Worker(), f"127.0.0.1:{port}"):
        info = (await registry.hear()).info
        loads = [load_from_proto((await registry.hear()).load) for _ in range(3)]
    await server.drain(0)

    assert info_from_proto(info) == INFO
    assert [load.engine_steps for load in loads] == [1, 2, 3]


async def test_a_heartbeat_can_be_sent_at_once() -> None:
    registry = Registry(lease_s=600)
    server, port = await listen(registry)
    async with announcing(Worker(), f"127.0.0.1:{port}") as announcer:
        for _ in range(2):
            await registry.hear()
        heard = asyncio.create_task(registry.hear())
        while not heard.done():
            announcer.announce_now()
            await asyncio.sleep(0.001)  # the stream's heartbeat task may only be starting
        assert heard.result().HasField("load")
    await server.drain(0)


async def test_a_router_can_ask_for_a_drain() -> None:
    registry = Registry()
    registry.answers.append(registry_pb2.RegisterResponse(lease_seconds=0.05, drain=True))
    worker = Worker()
    server, port = await listen(registry)
    async with announcing(worker, f"127.0.0.1:{port}"):
        await asyncio.wait_for(worker.drained.wait(), TIMEOUT_S)
    await server.drain(0)


async def test_it_registers_again_after_the_stream_ends_and_after_the_router_restarts() -> None:
    registry = Registry()
    server, port = await listen(registry)
    async with announcing(Worker(), f"127.0.0.1:{port}"):
        assert (await registry.hear()).HasField("info")
        registry.hang_up.set()
        while not (await registry.hear()).HasField("info"):
            pass
        await server.drain(0)

        successor = Registry()
        server, _ = await listen(successor, port)
        assert (await successor.hear()).HasField("info")
    await server.drain(0)


async def test_it_waits_for_a_router_that_is_not_there_yet() -> None:
    with socket.create_server(("127.0.0.1", 0)) as reservation:
        port = reservation.getsockname()[1]
    registry = Registry()
    async with announcing(Worker(), f"127.0.0.1:{port}"):
        server, _ = await listen(registry, port)
        assert (await registry.hear()).HasField("info")
    await server.drain(0)


async def test_every_router_is_told() -> None:
    registries = [Registry(), Registry()]
    listening = [await listen(registry) for registry in registries]
    async with announcing(Worker(), *(f"127.0.0.1:{port}" for _, port in listening)):
        for registry in registries:
            assert (await registry.hear()).HasField("info")
    for server, _ in listening:
        await server.drain(0)


async def test_a_name_stands_for_all_its_addresses_and_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    registries = {"127.0.0.1": Registry(), "127.0.0.2": Registry()}
    server = RpcServer("127.0.0.1:0", [registries["127.0.0.1"].service], announce_s=0)
    port = await server.start()
    late = RpcServer(f"127.0.0.2:{port}", [registries["127.0.0.2"].service], announce_s=0)
    await late.start()
    known = ["127.0.0.1"]

    async def getaddrinfo(host: str, port: int, **_: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        assert host == "routers.internal"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in known]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    async with announcing(Worker(), f"routers.internal:{port}"):
        assert (await registries["127.0.0.1"].hear()).HasField("info")
        assert registries["127.0.0.2"].num_streams == 0
        known.append("127.0.0.2")
        assert (await registries["127.0.0.2"].hear()).HasField("info")
        assert registries["127.0.0.1"].num_streams == 1
    await server.drain(0)
    await late.drain(0)
