"""A gRPC port with TLS and tokens: who is let in, what the others are told, and what a change of files does."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from shell.rpc import bounds
from shell.rpc.server import RpcServer, Service
from tandem.client import AsyncClient, Client
from tandem.errors import Reason, TandemError, Unauthenticated, Unavailable
from tandem.rpc.channel import open_channel
from tandem.rpc.received_error import error_from_rpc
from tandem.security.credentials import Incoming, Outgoing
from tandem.security.options import ClientSecurityConfig
from tandem.security.tls import ClientTls
from tandem.security.tokens import Tokens
from tandem.v1 import inference_pb2, inference_pb2_grpc
from tests.pki import LOOPBACK, OTHER_TOKEN, TOKEN, Pki

TIMEOUT_S = 20.0


class Inference(inference_pb2_grpc.InferenceServiceServicer):
    """Says what it is asked, or a number whenever it may."""

    def __init__(self) -> None:
        self.may_go_on = asyncio.Event()

    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizeRequest, context: object
    ) -> inference_pb2.TokenizeResponse:
        return inference_pb2.TokenizeResponse(token_ids=[1, 2])

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        yield inference_pb2.GenerateResponse(text="0")
        await self.may_go_on.wait()
        for number in range(1, 100):
            yield inference_pb2.GenerateResponse(text=str(number))


class Port:
    """A server and the ways to call it."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.servicer = Inference()
        self.number = 0

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.number}"

    async def open(self, incoming: Incoming) -> None:
        service = Service(
            "tandem.v1.InferenceService",
            lambda server: inference_pb2_grpc.add_InferenceServiceServicer_to_server(self.servicer, server),
        )
        server = RpcServer(f"{LOOPBACK}:0", [service], incoming=incoming, announce_s=0)
        self.number = await server.start()
        self._stack.push_async_callback(server.drain, 0)

    def channel(self, outgoing: Outgoing, called: str | None = None) -> grpc.aio.Channel:
        channel = open_channel(self.address, outgoing, called=called)
        self._stack.push_async_callback(channel.close)
        return channel

    def stub(self, tls: ClientTls | None) -> inference_pb2_grpc.InferenceServiceAsyncStub:
        return inference_pb2_grpc.InferenceServiceStub(self.channel(Outgoing(tls)))  # type: ignore[return-value]

    async def call(self, tls: ClientTls | None, token: str | None = None, called: str | None = None) -> None:
        """Raises what the failure of one call means to our clients."""
        stub = inference_pb2_grpc.InferenceServiceStub(self.channel(Outgoing(tls), called))
        metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        try:
            await stub.Tokenize(inference_pb2.TokenizeRequest(text="x"), timeout=TIMEOUT_S, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error


@pytest.fixture
async def port() -> AsyncIterator[Port]:
    async with AsyncExitStack() as stack:
        yield Port(stack)


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path)


@pytest.fixture
def stranger(tmp_path: Path) -> Pki:
    """An authority that the server does not know, and that does not know the server."""
    return Pki(tmp_path, "stranger")


@pytest.mark.parametrize(
    ("issued", "called_by", "said"),
    [
        ({}, lambda pki, stranger: stranger.caller(), "no authority"),
        ({"days": -1}, lambda pki, stranger: pki.caller(), "has expired"),
        (None, lambda pki, stranger: pki.caller(), "does not speak TLS"),
    ],
    ids=["unknown authority", "expired", "plain port"],
)
async def test_a_server_that_its_caller_cannot_trust_is_refused_with_the_reason(
    port: Port, pki: Pki, stranger: Pki, issued: Any, called_by: Callable[[Pki, Pki], ClientTls], said: str
) -> None:
    await port.open(Incoming() if issued is None else Incoming(pki.server(pki.issue(**issued))))

    with pytest.raises(Unavailable, match=said) as refused:
        await port.call(called_by(pki, stranger))
    assert refused.value.reason is Reason.TLS_FAILED


async def test_a_certificate_of_another_name_is_refused_unless_that_name_was_meant(port: Port, pki: Pki) -> None:
    await port.open(Incoming(pki.server(pki.issue("router.example"))))

    with pytest.raises(Unavailable, match="another name") as refused:
        await port.call(pki.caller())
    assert refused.value.reason is Reason.TLS_FAILED
    await port.call(pki.caller(server_name="router.example"))
    await port.call(pki.caller(), called="router.example")


async def test_a_plain_caller_of_a_tls_port_is_told_what_may_be_missing(port: Port, pki: Pki) -> None:
    await port.open(Incoming(pki.server(pki.issue())))

    with pytest.raises(Unavailable, match="does the server want TLS"):
        await port.call(None)


async def test_with_mutual_tls_only_certificates_of_the_authority_are_let_in(
    port: Port, pki: Pki, stranger: Pki
) -> None:
    await port.open(Incoming(pki.server(pki.issue(), mutual=True)))

    await port.call(pki.caller(pki.issue("a-worker")))
    for identity in (None, stranger.issue("a-worker"), pki.issue("a-worker", days=-1)):
        with pytest.raises(Unavailable, match="or a certificate of the caller"):
            await port.call(pki.caller(identity))


async def test_a_new_certificate_takes_effect_while_a_stream_goes_on(port: Port, pki: Pki, stranger: Pki) -> None:
    shown = pki.issue()
    await port.open(Incoming(pki.server(shown)))
    call = port.stub(pki.caller()).Generate(inference_pb2.GenerateRequest(), timeout=30)
    texts = [(await call.read()).text]  # type: ignore[union-attr]

    shown.show(stranger.issue())
    with pytest.raises(Unavailable, match="no authority"):
        await port.call(pki.caller())
    await port.call(stranger.caller())

    port.servicer.may_go_on.set()
    while isinstance(response := await call.read(), inference_pb2.GenerateResponse):
        texts.append(response.text)
    assert texts == [str(number) for number in range(100)]


@pytest.mark.parametrize(
    ("token", "said"), [(None, "a bearer token is needed"), (OTHER_TOKEN, "not one of those accepted")]
)
async def test_a_missing_or_wrong_token_is_refused(port: Port, pki: Pki, token: str | None, said: str) -> None:
    await port.open(Incoming(None, Tokens(pki.tokens(TOKEN))))

    with pytest.raises(Unauthenticated, match=said):
        await port.call(None, token)
    await port.call(None, TOKEN)


async def test_every_kind_of_call_is_refused_and_so_are_methods_that_do_not_exist(port: Port, pki: Pki) -> None:
    await port.open(Incoming(None, Tokens(pki.tokens(TOKEN))))
    channel = port.channel(Outgoing())
    streams = [
        inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest(), timeout=TIMEOUT_S),
        reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=TIMEOUT_S
        ),
        channel.unary_stream("/tandem.v1.InferenceService/NoSuchMethod")(b"", timeout=TIMEOUT_S),
        channel.unary_stream("/grpc.health.v1.HealthX/Check")(b"", timeout=TIMEOUT_S),
    ]

    for call in streams:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_health_needs_no_token(port: Port, pki: Pki) -> None:
    await port.open(Incoming(None, Tokens(pki.tokens(TOKEN))))
    stub = health_pb2_grpc.HealthStub(port.channel(Outgoing()))

    assert (await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)).status
    assert (await stub.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S).read()).status


async def test_without_a_token_a_connection_may_watch_health_a_few_times_only(port: Port, pki: Pki) -> None:
    await port.open(Incoming(None, Tokens(pki.tokens(TOKEN))))
    stub = health_pb2_grpc.HealthStub(port.channel(Outgoing()))
    bearer = (("authorization", f"Bearer {TOKEN}"),)

    def watch(*metadata: tuple[str, str]) -> grpc.aio.UnaryStreamCall[object, health_pb2.HealthCheckResponse]:
        return stub.Watch(health_pb2.HealthCheckRequest(), timeout=30, metadata=metadata)

    watching = [watch() for _ in range(8)]
    for call in watching:
        assert await call.read()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await watch().read()
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    assert await watch(*bearer).read()
    other = health_pb2_grpc.HealthStub(port.channel(Outgoing()))
    assert await other.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)


async def test_both_clients_bring_certificate_and_token(port: Port, pki: Pki) -> None:
    await port.open(Incoming(pki.server(pki.issue(), mutual=True), Tokens(pki.tokens(TOKEN))))
    security = pki.client(pki.issue("a-client"), pki.tokens(TOKEN))

    async with AsyncClient(port.address, security=security) as client:
        assert (await client.tokenize("x")).token_ids == (1, 2)
    assert (await asyncio.to_thread(tokenize, port.address, security)) == (1, 2)


def tokenize(target: str, security: ClientSecurityConfig) -> tuple[int, ...]:
    with Client(target, security=security) as client:
        return client.tokenize("x").token_ids


async def test_waiting_for_a_server_ends_at_once_where_tls_fails(port: Port, pki: Pki, stranger: Pki) -> None:
    await port.open(Incoming(pki.server(pki.issue())))

    def wait() -> TandemError:
        with Client(port.address, security=stranger.client()) as client, pytest.raises(TandemError) as refused:
            client.wait_ready(timeout_s=30)
        return refused.value

    async with asyncio.timeout(TIMEOUT_S):
        assert (await asyncio.to_thread(wait)).reason is Reason.TLS_FAILED
        async with AsyncClient(port.address, security=stranger.client()) as client:
            with pytest.raises(Unavailable) as refused:
                await client.wait_ready(timeout_s=30)
    assert refused.value.reason is Reason.TLS_FAILED


async def test_a_caller_that_never_shakes_hands_is_cut_off(
    port: Port, pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "HANDSHAKE_TIMEOUT_S", 0.2)
    await port.open(Incoming(pki.server(pki.issue())))
    reader, writer = await asyncio.open_connection(LOOPBACK, port.number)

    async with asyncio.timeout(TIMEOUT_S):
        assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("secured", [False, True])
async def test_garbage_ends_its_own_connection_only(port: Port, pki: Pki, secured: bool) -> None:
    await port.open(Incoming(pki.server(pki.issue()) if secured else None))
    tls = pki.caller() if secured else None

    def send_garbage() -> None:
        for garbage in (
            b"\x16\x03\x01\x02\x00\x01\x00" + b"\xff" * 600,
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00" * 99,
        ):
            with socket.create_connection((LOOPBACK, port.number)) as sock:
                sock.sendall(garbage)

    await asyncio.to_thread(send_garbage)
    await port.call(tls)


async def test_connections_beyond_the_cap_are_turned_away_until_others_leave(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "MAX_CONNECTIONS", 2)
    await port.open(Incoming())
    first, second, third = (port.channel(Outgoing()) for _ in range(3))

    async def tokenize(channel: grpc.aio.Channel) -> None:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        await stub.Tokenize(inference_pb2.TokenizeRequest(text="x"), timeout=TIMEOUT_S)

    await tokenize(first)
    await tokenize(second)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await tokenize(third)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE

    await first.close()
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                await tokenize(third)
                break
            except grpc.aio.AioRpcError:  # the server has yet to notice
                await asyncio.sleep(0.05)


async def test_metadata_beyond_the_cap_is_refused(port: Port) -> None:
    await port.open(Incoming())

    with pytest.raises(TandemError, match="RESOURCE_EXHAUSTED"):
        await port.call(None, "x" * 200_000)


def test_files_may_be_looked_at_by_many_threads_at_once(pki: Pki) -> None:
    shown = pki.issue()
    tls = pki.server(shown)
    shown.show(new := pki.issue())
    seen: list[bytes] = []
    threads = [threading.Thread(target=lambda: seen.append(tls.pem().chain)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert set(seen) == {Path(new.cert).read_bytes()}
