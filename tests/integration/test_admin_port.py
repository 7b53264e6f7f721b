"""The admin port of one process, called as Prometheus, browsers, grpcurl and strangers call it."""

from __future__ import annotations

import asyncio
import json
import ssl
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import grpc.aio
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tandem.admin.content import AdminContent, RouterReport
from tandem.admin.port import CHANNELZ, admin_port
from tandem.admin.site import HEADERS
from tandem.cluster_status import ClusterStatus
from tandem.errors import ConfigError
from tandem.rpc.channel import open_channel
from tandem.rpc.server import RpcServer
from tandem.security.credentials import Incoming, Outgoing
from tandem.security.tokens import Tokens
from tests.pki import OTHER_TOKEN, TOKEN, Pki

TIMEOUT_S = 20.0
PLAIN = Incoming()


@dataclass(frozen=True, slots=True)
class Process:
    """A process with a gRPC server of its own and an admin port."""

    server: RpcServer
    server_port: int
    admin: str


StartProcess = Callable[..., Awaitable[Process]]


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StartProcess]:
    """Starts processes; afterwards nothing of them may be left, neither tasks nor files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    async with AsyncExitStack() as stack:

        async def go(incoming: Incoming = PLAIN) -> Process:
            server = RpcServer("127.0.0.1:0", [], announce_s=0)
            port = await server.start()
            stack.push_async_callback(server.drain, 0)
            content = AdminContent(
                health=server.health,
                report=lambda: RouterReport(cluster=ClusterStatus("demo", True, "", 0, 0, 0, ())),
                metrics=lambda: (b"up 1\n", "text/plain; version=0.0.4"),
                targets=lambda: (),
            )
            address = await stack.enter_async_context(admin_port("127.0.0.1:0", content, incoming))
            return Process(server, port, address)

        yield go
    assert list(folder.iterdir()) == []
    assert [task.get_name() for task in asyncio.all_tasks() if "admin" in task.get_name()] == []


async def fetch(url: str, **options: object) -> tuple[int, str, str]:
    """Status, content type and body of one GET."""
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(TIMEOUT_S)) as session,
        session.get(url, **options) as response,  # type: ignore[arg-type]
    ):
        return response.status, response.headers["Content-Type"], await response.text()


async def talk(address: str, said: bytes) -> bytes:
    """What raw bytes are answered with, until the connection ends."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(said)
    async with asyncio.timeout(TIMEOUT_S):
        answer = await reader.read()
    writer.close()
    return answer


# ---- both protocols on one port


async def test_http_is_answered(start: StartProcess) -> None:
    process = await start()
    status, kind, body = await fetch(f"http://{process.admin}/status.json")
    assert (status, kind, json.loads(body)["cluster"]["model"]) == (200, "application/json", "demo")


async def sockets_of_servers(channelz: channelz_pb2_grpc.ChannelzStub) -> list[channelz_pb2.Socket]:
    """Every connection to every server of the process, as channelz tells of them."""
    servers = await channelz.GetServers(channelz_pb2.GetServersRequest(), timeout=TIMEOUT_S)
    found: list[channelz_pb2.Socket] = []
    for server in servers.server:
        request = channelz_pb2.GetServerSocketsRequest(server_id=server.ref.server_id)
        for ref in (await channelz.GetServerSockets(request, timeout=TIMEOUT_S)).socket_ref:
            one = channelz_pb2.GetSocketRequest(socket_id=ref.socket_id)
            found.append((await channelz.GetSocket(one, timeout=TIMEOUT_S)).socket)
    return found


async def test_channelz_tells_of_the_process_own_server_and_its_sockets(start: StartProcess) -> None:
    process = await start()
    async with open_channel(f"127.0.0.1:{process.server_port}") as caller, open_channel(process.admin) as channel:
        for _ in range(3):
            await health_pb2_grpc.HealthStub(caller).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        sockets = await sockets_of_servers(channelz_pb2_grpc.ChannelzStub(channel))
    (own,) = [each for each in sockets if each.local.tcpip_address.port == process.server_port]
    assert own.data.streams_started == 3


async def test_channelz_tells_of_channels_that_the_process_opened(start: StartProcess) -> None:
    process = await start()
    async with open_channel(process.admin) as channel:
        told = await channelz_pb2_grpc.ChannelzStub(channel).GetTopChannels(
            channelz_pb2.GetTopChannelsRequest(), timeout=TIMEOUT_S
        )
    assert any(process.admin in each.data.target for each in told.channel)


async def test_reflection_lists_what_is_served_there(start: StartProcess) -> None:
    process = await start()
    async with open_channel(process.admin) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(timeout=TIMEOUT_S)
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = await call.read()
        await call.done_writing()
    assert {service.name for service in listed.list_services_response.service} >= {CHANNELZ, "grpc.health.v1.Health"}


async def test_health_is_the_process_own(start: StartProcess) -> None:
    process = await start()
    async with open_channel(process.admin) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watching = stub.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        assert (await watching.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await fetch(f"http://{process.admin}/readyz"))[0] == 503
        process.server.set_serving(True)
        assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert (await fetch(f"http://{process.admin}/readyz"))[0] == 200


async def test_without_an_address_there_is_no_port(start: StartProcess) -> None:
    process = await start()
    content = AdminContent(health=process.server.health, report=None, metrics=None)  # type: ignore[arg-type]
    async with admin_port(None, content, PLAIN) as address:
        assert address == ""


async def test_an_address_that_is_taken_is_a_bad_option_and_leaves_nothing_behind(start: StartProcess) -> None:
    process = await start()
    content = AdminContent(health=process.server.health, report=None, metrics=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--admin-listen"):
        async with admin_port(process.admin, content, PLAIN):
            pass


async def test_after_it_has_closed_nobody_is_answered() -> None:
    server = RpcServer("127.0.0.1:0", [], announce_s=0)
    content = AdminContent(health=server.health, report=None, metrics=None)  # type: ignore[arg-type]
    async with admin_port("127.0.0.1:0", content, PLAIN) as address:
        channel = open_channel(address)
        watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        await watching.read()
    with pytest.raises(aiohttp.ClientConnectorError):
        await fetch(f"http://{address}/livez")
    async with asyncio.timeout(TIMEOUT_S):
        await watching.code()
    await channel.close()


# ---- callers that mean no good


GARBAGE = {
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "zeros": b"\x00" * 1000,
    "method": b"GARBAGE\r\n\r\n",
    "no-path": b"GET\r\n\r\n",
    "version": b"GET / HTTP/9.9\r\n\r\n",
    "address": b"GET http://[::1/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "host": b"GET http://xn--/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "field-name": b"GET / HTTP/1.1\r\nHost: localhost\r\nA b: c\r\n\r\n",
    "two-hosts": b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: elsewhere\r\n\r\n",
    "long-field": b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    "long-line": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "many-fields": b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 100_000 + b"\r\n",
    "length": b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
}


def assert_ours(answer: bytes) -> None:
    """It says no more than we want said, and bears the headers of every answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    for name, value in HEADERS.items():
        assert f"{name}: {value}".encode() in head.split(b"\r\n")
    assert b"aiohttp" not in head
    assert body in {b"not a request that this port understands\n", b"a token is needed\n"}


@pytest.mark.parametrize("said", GARBAGE.values(), ids=GARBAGE)
async def test_garbage_is_refused_and_the_port_lives_on(
    start: StartProcess, said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    process = await start()
    caplog.clear()
    try:
        answer = await talk(process.admin, said)
    except ConnectionResetError:  # it went before all was said
        answer = b""
    assert caplog.records == []
    if answer:
        assert answer.startswith(b"HTTP/1.0 400 ")
        assert_ours(answer)
    assert (await fetch(f"http://{process.admin}/livez"))[0] == 200


async def test_a_token_that_is_no_text_is_refused_as_any_other(
    start: StartProcess, pki: Pki, caplog: pytest.LogCaptureFixture
) -> None:
    process = await start(Incoming(None, Tokens(pki.tokens(TOKEN))))
    caplog.clear()
    answer = await talk(process.admin, b"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert_ours(answer)
    assert caplog.records == []


async def test_a_preface_with_garbage_behind_is_refused_and_grpc_lives_on(start: StartProcess) -> None:
    process = await start()
    await talk(process.admin, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 1000)
    async with open_channel(process.admin) as channel:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)


async def test_a_second_request_on_a_connection_is_not_answered(start: StartProcess) -> None:
    process = await start()
    request = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert (await talk(process.admin, request * 3)).count(b"HTTP/1.1 200") == 1


async def test_head_gets_the_headers_alone(start: StartProcess) -> None:
    process = await start()
    answer = await talk(process.admin, b"HEAD /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"Content-Length: 5" in head
    assert b"X-Content-Type-Options: nosniff" in head
    assert body == b""


async def test_a_report_that_fails_is_an_error_without_its_reason(
    start: StartProcess, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> RouterReport:
        raise ZeroDivisionError("secret")

    server = RpcServer("127.0.0.1:0", [], announce_s=0)
    content = AdminContent(health=server.health, report=fail, metrics=None)  # type: ignore[arg-type]
    async with admin_port("127.0.0.1:0", content, PLAIN) as address:
        status, _, body = await fetch(f"http://{address}/status.json")
    assert status == 500
    assert "secret" not in body
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [
        "admin port: a request failed"
    ]


# ---- TLS and tokens


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    """One authority."""
    return Pki(tmp_path)


def trusting(pki: Pki, *alpn: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=pki.ca)
    context.set_alpn_protocols(list(alpn))
    return context


async def test_both_protocols_speak_tls_on_the_one_port(start: StartProcess, pki: Pki) -> None:
    process = await start(Incoming(pki.server(pki.issue())))
    assert (await fetch(f"https://{process.admin}/livez", ssl=trusting(pki)))[0] == 200
    async with open_channel(process.admin, Outgoing(pki.caller())) as channel:
        told = await channelz_pb2_grpc.ChannelzStub(channel).GetServers(
            channelz_pb2.GetServersRequest(), timeout=TIMEOUT_S
        )
    assert told.server


@pytest.mark.parametrize(
    ("offered", "taken"), [(("h2", "http/1.1"), "http/1.1"), (("h2",), "h2"), (("http/1.1",), "http/1.1")]
)
async def test_who_speaks_both_gets_http1_and_who_speaks_only_h2_gets_that(
    start: StartProcess, pki: Pki, offered: tuple[str, ...], taken: str
) -> None:
    process = await start(Incoming(pki.server(pki.issue())))
    host, _, port = process.admin.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=trusting(pki, *offered))
    assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == taken
    writer.close()


async def test_with_tls_plain_callers_are_refused(start: StartProcess, pki: Pki) -> None:
    process = await start(Incoming(pki.server(pki.issue())))
    with pytest.raises(aiohttp.ClientError):
        await fetch(f"http://{process.admin}/livez")
    async with open_channel(process.admin) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)


async def test_with_mutual_tls_callers_without_a_certificate_are_refused(start: StartProcess, pki: Pki) -> None:
    identity = pki.issue()
    process = await start(Incoming(pki.server(identity, mutual=True)))
    with pytest.raises(aiohttp.ClientError):
        await fetch(f"https://{process.admin}/livez", ssl=trusting(pki))
    context = trusting(pki)
    context.load_cert_chain(identity.cert, identity.key)
    assert (await fetch(f"https://{process.admin}/livez", ssl=context))[0] == 200


@pytest.mark.parametrize(
    ("shown", "code"),
    [
        (None, grpc.StatusCode.UNAUTHENTICATED),
        (OTHER_TOKEN, grpc.StatusCode.UNAUTHENTICATED),
        (TOKEN, grpc.StatusCode.OK),
    ],
)
async def test_channelz_wants_the_token(
    start: StartProcess, pki: Pki, shown: str | None, code: grpc.StatusCode
) -> None:
    process = await start(Incoming(None, Tokens(pki.tokens(TOKEN))))
    metadata = () if shown is None else (("authorization", f"Bearer {shown}"),)
    async with open_channel(process.admin) as channel:
        call = channelz_pb2_grpc.ChannelzStub(channel).GetServers(
            channelz_pb2.GetServersRequest(), timeout=TIMEOUT_S, metadata=metadata
        )
        assert await call.code() == code


async def test_http_wants_the_token(start: StartProcess, pki: Pki) -> None:
    process = await start(Incoming(None, Tokens(pki.tokens(TOKEN))))
    assert (await fetch(f"http://{process.admin}/metrics"))[0] == 401
    shown = {"Authorization": f"Bearer {TOKEN}"}
    assert await fetch(f"http://{process.admin}/metrics", headers=shown) == (200, "text/plain; version=0.0.4", "up 1\n")
