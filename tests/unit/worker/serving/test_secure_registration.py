"""Workers and routers that find each other by TLS and tokens, and what is said where they do not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shell.rpc.server import RpcServer, Service
from tandem.errors import Reason, Unavailable
from tandem.security.credentials import Incoming, Outgoing
from tandem.security.tokens import Tokens
from tandem.v1 import registry_pb2, registry_pb2_grpc
from tests.pki import LOOPBACK, OTHER_TOKEN, TOKEN, Pki, replace_file
from tests.registering import IDLE, INFO
from worker.serving.announcer import Announcer

TIMEOUT_S = 10.0


class Registry(registry_pb2_grpc.RegistryServiceServicer):
    """Notes who came."""

    def __init__(self) -> None:
        self.registered = asyncio.Event()

    async def Register(  # noqa: N802
        self, requests: AsyncIterator[registry_pb2.RegisterRequest], context: object
    ) -> AsyncIterator[registry_pb2.RegisterResponse]:
        async for _ in requests:
            self.registered.set()
            yield registry_pb2.RegisterResponse(lease_seconds=5.0)


@asynccontextmanager
async def router(incoming: Incoming, registry: Registry | None = None) -> AsyncIterator[tuple[Registry, int]]:
    registry = registry or Registry()
    service = Service(
        "tandem.v1.RegistryService",
        lambda server: registry_pb2_grpc.add_RegistryServiceServicer_to_server(registry, server),
        long_lived=True,
    )
    server = RpcServer(f"{LOOPBACK}:0", [service], incoming=incoming, announce_s=0)
    port = await server.start()
    try:
        yield registry, port
    finally:
        await server.drain(0)


@asynccontextmanager
async def worker(router_address: str, outgoing: Outgoing) -> AsyncIterator[None]:
    announcer = Announcer((router_address,), INFO, lambda: IDLE, lambda: None, outgoing=outgoing)
    task = asyncio.create_task(announcer.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Any:
    """Waits for a warning that says something."""

    async def warned(text: str) -> bool:
        async with asyncio.timeout(TIMEOUT_S):
            while not any(text in str(record.fields) for record in caplog.records if record.levelname == "WARNING"):  # type: ignore[attr-defined]  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return True

    return warned


async def test_a_worker_registers_with_a_router_known_by_name(pki: Pki) -> None:
    """It dials the address that `localhost` resolves to; the certificate bears the name."""
    incoming = Incoming(pki.server(pki.issue("localhost"), mutual=True), Tokens(pki.tokens(TOKEN)))
    outgoing = Outgoing(pki.caller(pki.issue("a-worker")), Tokens(pki.tokens(TOKEN)))
    async with router(incoming) as (registry, port), worker(f"localhost:{port}", outgoing):
        await asyncio.wait_for(registry.registered.wait(), TIMEOUT_S)


async def test_a_worker_with_a_wrong_token_says_so_and_registers_once_it_is_mended(
    pki: Pki, tmp_path: Path, warnings: Any
) -> None:
    wrong = str(tmp_path / "wrong")
    replace_file(wrong, f"{OTHER_TOKEN}\n".encode())
    async with (
        router(Incoming(None, Tokens(pki.tokens(TOKEN)))) as (registry, port),
        worker(f"{LOOPBACK}:{port}", Outgoing(None, Tokens(wrong))),
    ):
        assert await warnings("not one of those accepted")
        assert not registry.registered.is_set()
        replace_file(wrong, f"{TOKEN}\n".encode())

        await asyncio.wait_for(registry.registered.wait(), TIMEOUT_S)


class FullRegistry(Registry):
    """One in which the worker's name is taken until it is given up."""

    def __init__(self) -> None:
        super().__init__()
        self.given_up = False

    async def Register(  # noqa: N802
        self, requests: AsyncIterator[registry_pb2.RegisterRequest], context: object
    ) -> AsyncIterator[registry_pb2.RegisterResponse]:
        if not self.given_up:
            raise Unavailable("worker w is registered by another identity", Reason.WORKER_ID_TAKEN)
        async for answer in super().Register(requests, context):
            yield answer


async def test_a_worker_whose_name_is_taken_says_so_and_registers_once_it_is_free(warnings: Any) -> None:
    registry = FullRegistry()
    async with router(Incoming(), registry) as (_, port), worker(f"{LOOPBACK}:{port}", Outgoing()):
        assert await warnings("registered by another identity")
        registry.given_up = True
        await asyncio.wait_for(registry.registered.wait(), TIMEOUT_S)


async def test_a_worker_that_does_not_trust_its_router_says_so(pki: Pki, tmp_path: Path, warnings: Any) -> None:
    stranger = Pki(tmp_path, "stranger")
    async with (
        router(Incoming(pki.server(pki.issue()))) as (registry, port),
        worker(f"{LOOPBACK}:{port}", Outgoing(stranger.caller())),
    ):
        assert await warnings("no authority")
        assert not registry.registered.is_set()
