from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from bench.support.ports import free_ports
from shell.rpc.server import RpcServer
from tandem.convert import info_from_proto, load_from_proto
from tandem.types import PoolCounts, WorkerLoad
from tandem.v1 import registry_pb2
from tests.fake_registry import Registry, listen
from tests.registering import INFO
from worker.serving.announcer import Announcer, Rhythm

TIMEOUT_S = 20
LEASE_S = 0.75
"""Of tests that a late heartbeat, and so a new registration, would disturb."""


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


async def test_info_comes_first_and_heartbeats_follow_with_fresh_loads() -> None:
    registry = Registry(LEASE_S)
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


async def test_a_worker_that_is_set_apart_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry(LEASE_S)
    (granted,) = registry.answers
    apart = registry_pb2.RegisterResponse(lease_seconds=LEASE_S, set_apart="model_fingerprint differs")
    registry.answers = [granted, apart, apart, registry_pb2.RegisterResponse(lease_seconds=LEASE_S, drain=True)]
    server, port = await listen(registry)
    worker = Worker()
    async with announcing(worker, f"127.0.0.1:{port}"), asyncio.timeout(TIMEOUT_S):
        await worker.drained.wait()
    await server.drain(0)

    said = [record for record in caplog.records if record.levelname == "WARNING"]
    assert ["model_fingerprint differs" in str(vars(record)) for record in said] == [True]


def test_a_heartbeat_is_due_when_the_load_changed_and_at_least_thrice_per_lease() -> None:
    rhythm, load = Rhythm(lease_s=6.0, pause_s=0.0), Worker().load()
    assert rhythm.pause_s == 0.25

    def pauses_until_due(load: WorkerLoad) -> int:
        number = next(number for number in range(1, 100) if rhythm.is_due(load))
        rhythm.sent(load)
        return number

    assert pauses_until_due(load) == 1, "the first one"
    assert pauses_until_due(load) == 8
    assert pauses_until_due(replace(load, engine_steps=9, step_s=0.1, prompt_tokens_per_s=5.0)) == 8, "that it steps"
    assert pauses_until_due(replace(load, running_seqs=1)) == 1
    assert pauses_until_due(replace(load, pool=replace(load.pool, free=7, live=1))) == 1
    assert pauses_until_due(replace(load, pool=replace(load.pool, free=7, live=1, unused_slots=3))) == 8


@pytest.mark.parametrize(("asked_s", "pause_s"), [(0.1, 0.25), (1.0, 1.0), (50.0, 2.0)])
def test_a_router_with_many_workers_is_told_less_often_but_never_less_than_its_lease_needs(
    asked_s: float, pause_s: float
) -> None:
    assert Rhythm(lease_s=6.0, pause_s=asked_s).pause_s == pause_s


async def test_a_router_can_ask_for_a_drain() -> None:
    registry = Registry()
    registry.answers.append(registry_pb2.RegisterResponse(lease_seconds=0.05, drain=True))
    worker = Worker()
    server, port = await listen(registry)
    async with announcing(worker, f"127.0.0.1:{port}"):
        await asyncio.wait_for(worker.drained.wait(), TIMEOUT_S)
    await server.drain(0)


@pytest.mark.parametrize("code", [grpc.StatusCode.OK, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED])
async def test_it_registers_again_after_the_stream_ends_and_after_the_router_restarts(code: grpc.StatusCode) -> None:
    registry = Registry()
    registry.code = code
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
    (port,) = free_ports(1)
    registry = Registry()
    async with announcing(Worker(), f"127.0.0.1:{port}"):
        server, _ = await listen(registry, port)
        assert (await registry.hear()).HasField("info")
    await server.drain(0)


async def test_a_router_that_stops_is_no_matter_for_advice(caplog: pytest.LogCaptureFixture) -> None:
    def ended() -> list[str]:
        return [str(vars(each)) for each in caplog.records if each.getMessage() == "registration ended"]

    caplog.set_level("INFO")
    (nobody,) = free_ports(1)
    registry = Registry(LEASE_S)
    server, port = await listen(registry)
    stopped, absent = f"127.0.0.1:{port}", f"127.0.0.1:{nobody}"
    async with announcing(Worker(), stopped, absent), asyncio.timeout(TIMEOUT_S):
        assert (await registry.hear()).HasField("info")
        for _ in range(2):  # the second load is a heartbeat, which only a registered worker sends
            assert (await registry.hear()).HasField("load")
        await server.drain(0)
        while sum(stopped in each for each in ended()) < 3:  # noqa: ASYNC110 - the stream, then calls that nobody takes
            await asyncio.sleep(0.001)
    assert [each for each in ended() if stopped in each and "`tandem serve`" in each] == []
    assert [each for each in ended() if absent in each and "`tandem serve`" in each] != []


async def test_every_router_is_told() -> None:
    registries = [Registry(), Registry()]
    listening = [await listen(registry) for registry in registries]
    async with announcing(Worker(), *(f"127.0.0.1:{port}" for _, port in listening)):
        for registry in registries:
            assert (await registry.hear()).HasField("info")
    for server, _ in listening:
        await server.drain(0)


class Names:
    """A resolver: `routers.internal` stands for `known`."""

    def __init__(self, *known: str) -> None:
        self.known = list(known)
        self._asked = asyncio.Event()

    async def getaddrinfo(self, host: str, port: int, **_: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        assert host == "routers.internal"
        self._asked.set()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in self.known]

    async def asked_again(self) -> None:
        """Returns once what the resolver says now was heeded: the lookup after the next one has begun."""
        for _ in range(2):
            self._asked.clear()
            await asyncio.wait_for(self._asked.wait(), TIMEOUT_S)


@asynccontextmanager
async def two_routers() -> AsyncIterator[tuple[dict[str, Registry], dict[str, RpcServer], int]]:
    """At 127.0.0.1 and 127.0.0.2, on one port."""
    registries = {"127.0.0.1": Registry(LEASE_S), "127.0.0.2": Registry(LEASE_S)}
    servers: dict[str, RpcServer] = {}
    port = 0
    for host, registry in registries.items():
        servers[host], port = await listen(registry, port, host)
    try:
        yield registries, servers, port
    finally:
        for server in servers.values():
            await server.drain(0)


async def test_a_name_stands_for_all_its_addresses_and_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names("127.0.0.1")
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", names.getaddrinfo)
    async with two_routers() as (registries, _, port), announcing(Worker(), f"routers.internal:{port}"):
        assert (await registries["127.0.0.1"].hear()).HasField("info")
        assert registries["127.0.0.2"].num_streams == 0
        names.known.append("127.0.0.2")
        assert (await registries["127.0.0.2"].hear()).HasField("info")
        assert registries["127.0.0.1"].num_streams == 1


async def test_a_router_that_left_the_name_is_kept_while_its_stream_stands_and_then_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = Names("127.0.0.1", "127.0.0.2")
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", names.getaddrinfo)
    async with two_routers() as (registries, servers, port), announcing(Worker(), f"routers.internal:{port}"):
        leaving = registries["127.0.0.2"]
        assert (await leaving.hear()).HasField("info")
        names.known.remove("127.0.0.2")
        await names.asked_again()
        while not leaving.said.empty():
            leaving.said.get_nowait()
        assert (await leaving.hear()).HasField("load")

        [held] = [task for task in asyncio.all_tasks() if task.get_name() == f"register-127.0.0.2:{port}"]
        await servers["127.0.0.2"].drain(0)
        await asyncio.wait_for(held, TIMEOUT_S)

        stranger = Registry()
        servers["127.0.0.2"], _ = await listen(stranger, port, "127.0.0.2")
        names.known.append("127.0.0.2")
        assert (await stranger.hear()).HasField("info")


async def test_routers_whose_name_is_not_found_for_a_while_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names("127.0.0.1")
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", names.getaddrinfo)
    async with two_routers() as (registries, _, port), announcing(Worker(), f"routers.internal:{port}"):
        assert (await registries["127.0.0.1"].hear()).HasField("info")
        names.known.clear()
        await names.asked_again()
        registries["127.0.0.1"].hang_up.set()
        while not (await registries["127.0.0.1"].hear()).HasField("info"):
            pass
