"""The admin port of one process, called as Prometheus, browsers and strangers call it."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import uvloop

from shell.admin import port as port_module
from shell.admin.content import AdminContent, RouterReport
from shell.admin.port import admin_port
from shell.rpc.server import RpcServer
from tandem.cluster_status import ClusterStatus
from tandem.errors import ConfigError
from tandem.security.credentials import Incoming
from tandem.security.tokens import Tokens
from tests.pki import TOKEN, Pki

TIMEOUT_S = 20.0
PLAIN = Incoming()


@dataclass(frozen=True, slots=True)
class Process:
    """A process with an admin port."""

    server: RpcServer
    admin: str


StartProcess = Callable[..., Awaitable[Process]]


@pytest.fixture
async def start() -> AsyncIterator[StartProcess]:
    """Starts processes; afterwards no task of theirs may be left."""
    async with AsyncExitStack() as stack:

        async def go(incoming: Incoming = PLAIN) -> Process:
            server = RpcServer("127.0.0.1:0", [], announce_s=0)
            content = AdminContent(
                health=server.health,
                report=lambda: RouterReport(cluster=ClusterStatus("demo", True, "", 0, 0, 0, ())),
                history=dict,
                metrics=lambda _: (b"up 1\n", "text/plain; version=0.0.4"),
                targets=lambda: (),
            )
            address = await stack.enter_async_context(admin_port("127.0.0.1:0", content, incoming))
            return Process(server, address)

        yield go
    assert [task for task in asyncio.all_tasks() if "RequestHandler" in repr(task)] == []


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


async def test_http_is_answered(start: StartProcess) -> None:
    process = await start()
    status, kind, body = await fetch(f"http://{process.admin}/status.json")
    assert (status, kind, json.loads(body)["cluster"]["model"]) == (200, "application/json", "demo")


async def test_an_address_that_is_taken_is_a_bad_option_and_leaves_nothing_behind(start: StartProcess) -> None:
    process = await start()
    content = AdminContent(health=process.server.health, report=None, history=dict, metrics=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--admin-listen"):
        async with admin_port(process.admin, content, PLAIN):
            pass


async def test_a_default_that_is_taken_gives_way_to_any_free_port(start: StartProcess) -> None:
    process = await start()
    content = AdminContent(health=process.server.health, report=None, history=dict, metrics=None)  # type: ignore[arg-type]
    async with admin_port(process.admin, content, PLAIN, falls_back=True) as address:
        assert address != process.admin
        assert (await fetch(f"http://{address}/readyz"))[0] == 503


# ---- callers that mean no good


GARBAGE = {
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "zeros": b"\x00" * 1000,
    "method": b"GARBAGE\r\n\r\n",
    "no-path": b"GET\r\n\r\n",
    "version": b"GET / HTTP/9.9\r\n\r\n",
    "address": b"GET http://[::1/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "field-name": b"GET / HTTP/1.1\r\nHost: localhost\r\nA b: c\r\n\r\n",
    "two-hosts": b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: elsewhere\r\n\r\n",
    "long-field": b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    "long-line": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "many-fields": b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 100_000 + b"\r\n",
    "length": b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
}


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
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert not answer or answer.startswith(b"HTTP/1.0 400 ")
    assert (await fetch(f"http://{process.admin}/livez"))[0] == 200


@pytest.mark.parametrize("said", [b"", b"GET /livez HTTP/1.1\r\n", b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"])
async def test_a_connection_that_asks_nothing_more_is_closed(
    start: StartProcess, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(port_module, "_IDLE_S", 0.2)
    process = await start()
    await talk(process.admin, said)


async def test_a_request_that_drips_in_is_cut_off(start: StartProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_module, "_IDLE_S", 0.2)
    process = await start()
    host, _, port = process.admin.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /")
    async with asyncio.timeout(TIMEOUT_S):
        while not reader.at_eof() and reader.exception() is None:  # each byte buys nothing; a reset is an end, too
            writer.write(b"a")
            await asyncio.sleep(0.01)
    writer.close()


async def test_a_report_that_fails_is_an_error_without_its_reason(
    start: StartProcess, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> RouterReport:
        raise ZeroDivisionError("secret")

    server = RpcServer("127.0.0.1:0", [], announce_s=0)
    content = AdminContent(health=server.health, report=fail, history=dict, metrics=None)  # type: ignore[arg-type]
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
    if alpn:
        context.set_alpn_protocols(list(alpn))
    return context


def test_with_tls_silent_callers_do_not_keep_out_a_probe(pki: Pki) -> None:
    async def main() -> None:
        content = AdminContent(health=RpcServer("127.0.0.1:0", []).health, report=None, history=dict, metrics=None)  # type: ignore[arg-type]
        async with admin_port("127.0.0.1:0", content, Incoming(pki.server(pki.issue()))) as address:
            host, _, port = address.rpartition(":")
            silent = [await asyncio.open_connection(host, int(port)) for _ in range(200)]
            assert (await fetch(f"https://{address}/livez", ssl=trusting(pki)))[0] == 200
            for _, writer in silent:
                writer.close()

    uvloop.run(main())  # as processes do


async def test_a_new_certificate_is_used_at_the_next_handshake(start: StartProcess, pki: Pki, tmp_path: Path) -> None:
    shown, stranger = pki.issue(), Pki(tmp_path, "stranger")
    process = await start(Incoming(pki.server(shown)))
    assert (await fetch(f"https://{process.admin}/livez", ssl=trusting(pki)))[0] == 200
    shown.show(stranger.issue())
    assert (await fetch(f"https://{process.admin}/livez", ssl=trusting(stranger)))[0] == 200


async def test_http_wants_the_token(start: StartProcess, pki: Pki) -> None:
    process = await start(Incoming(None, Tokens(pki.tokens(TOKEN))))
    assert (await fetch(f"http://{process.admin}/metrics"))[0] == 401
    shown = {"Authorization": f"Bearer {TOKEN}"}
    assert await fetch(f"http://{process.admin}/metrics", headers=shown) == (200, "text/plain; version=0.0.4", "up 1\n")
