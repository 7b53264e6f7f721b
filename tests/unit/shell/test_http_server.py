"""The shell of an HTTP server, around handlers of the tests' own."""

from __future__ import annotations

import asyncio
import gzip
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from shell.http import server as shell_server
from shell.http.server import Call, HttpServer, Route, write
from shell.telemetry.metric import Process
from shell.telemetry.metrics import Metrics
from tandem.errors import ConfigError, Overloaded, TandemError
from tandem.security.credentials import Incoming
from tandem.security.tokens import Tokens
from tests.pki import TOKEN
from tests.recorded_spans import RecordedSpans

Start = Callable[..., Awaitable[str]]
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def error_response(path: str, error: TandemError) -> web.Response:
    return web.json_response({"path": path, "message": error.message, "reason": error.reason}, status=400)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(Process.ROUTER, "tiny")


@pytest.fixture
async def start(metrics: Metrics) -> AsyncIterator[Start]:
    """`url = await start(handler, …)`: the handler answers GET and POST of /it, and the probe /probe."""
    async with AsyncExitStack() as stack:

        async def begin(handler: Callable[[Call], Awaitable[web.StreamResponse]], **options: Any) -> str:
            routes = [
                Route("GET", "/it", handler),
                Route("POST", "/it", handler),
                Route("GET", "/probe", handler, True),
            ]
            given: dict[str, Any] = {"incoming": Incoming(), "max_body_bytes": 1000, "metrics": metrics, **options}
            server = HttpServer("127.0.0.1:0", routes, error_response, **given)
            port = await server.start()
            stack.push_async_callback(server.close)
            begin.server = server  # type: ignore[attr-defined]
            return f"http://127.0.0.1:{port}"

        yield begin


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def hello(call: Call) -> web.StreamResponse:
    return web.Response(text="hello")


async def echo(call: Call) -> web.StreamResponse:
    return web.Response(body=await call.body())


async def test_an_error_is_answered_in_the_words_of_the_face(start: Start, http: aiohttp.ClientSession) -> None:
    async def refuse(call: Call) -> web.StreamResponse:
        raise Overloaded("full")

    url = await start(refuse)
    async with http.get(f"{url}/it") as answer:
        assert await answer.json() == {"path": "/it", "message": "full", "reason": "QUEUE_FULL"}
        assert answer.headers["Server"] == "tandem"


async def test_a_bug_is_answered_with_an_id_alone(start: Start, http: aiohttp.ClientSession) -> None:
    async def fail(call: Call) -> web.StreamResponse:
        raise ValueError("the prompt")

    url = await start(fail)
    async with http.get(f"{url}/it") as answer:
        said = await answer.text()
    assert "internal error" in said
    assert "the prompt" not in said


async def test_a_token_is_asked_for_in_either_header_but_not_of_probes(
    start: Start, http: aiohttp.ClientSession, tmp_path: Any
) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"{TOKEN} name=me max-priority=3\n")
    found: list[Any] = []

    async def note(call: Call) -> web.StreamResponse:
        found.append(call.identity)
        return web.Response()

    url = await start(note, incoming=Incoming(None, Tokens(str(file))))
    shown: list[dict[str, str]] = [{"Authorization": f"Bearer {TOKEN}"}, {"x-api-key": TOKEN}]
    for headers in shown:
        async with http.get(f"{url}/it", headers=headers) as answer:
            assert answer.status == 200
    assert [(each.name, each.max_priority) for each in found] == [("me", 3)] * 2
    for headers in ({}, {"x-api-key": "wrong"}):
        async with http.get(f"{url}/it", headers=headers) as answer:
            assert (await answer.json())["reason"] == "UNAUTHENTICATED"
    async with http.get(f"{url}/probe") as answer:
        assert answer.status == 200


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_beyond_the_limit_is_refused(start: Start, http: aiohttp.ClientSession, chunked: bool) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b" " * 600

    url = await start(echo)
    data: Any = parts() if chunked else b" " * 1800
    async with http.post(f"{url}/it", data=data, headers={"Content-Type": "application/json"}) as answer:
        assert (await answer.json())["reason"] == "INVALID_FIELD"


async def test_bodies_that_are_too_large_together_are_refused(
    start: Start, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell_server, "_MAX_BODY_BYTES_HELD", 1500)
    inside, release = asyncio.Event(), asyncio.Event()

    async def hold(call: Call) -> web.StreamResponse:
        await call.body()
        inside.set()
        await release.wait()
        return web.Response()

    url = await start(hold)
    json_type = {"Content-Type": "application/json"}
    first = asyncio.ensure_future(http.post(f"{url}/it", data=b" " * 900, headers=json_type))
    await inside.wait()
    async with http.post(f"{url}/it", data=b" " * 900, headers=json_type) as answer:
        assert (await answer.json())["reason"] == "QUEUE_FULL"
    release.set()
    assert (await first).status == 200


async def test_a_body_that_is_announced_and_not_sent_takes_no_room(
    start: Start, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell_server, "_MAX_BODY_BYTES_HELD", 1500)
    url = await start(echo)
    host, port = url.removeprefix("http://").split(":")
    head = b"POST /it HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port))) as slow, socket.create_connection((host, int(port))) as chunked:
        slow.sendall(head + b"Content-Length: 900\r\n\r\n")
        chunked.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        async with http.post(f"{url}/it", data=b" " * 900, headers={"Content-Type": "application/json"}) as answer:
            assert answer.status == 200


@pytest.mark.parametrize("body", [b"no gzip", gzip.compress(b" " * 100_000)], ids=["broken", "bomb"])
async def test_a_compressed_body_is_refused(start: Start, http: aiohttp.ClientSession, body: bytes) -> None:
    url = await start(echo)
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    async with http.post(f"{url}/it", data=body, headers=headers) as answer:
        assert "Content-Encoding" in (await answer.json())["message"]


@pytest.mark.parametrize("error", [ValueError("a bug"), Overloaded("full")], ids=["bug", "refusal"])
async def test_an_answer_that_has_begun_is_cut_by_an_error(
    start: Start, http: aiohttp.ClientSession, metrics: Metrics, error: Exception
) -> None:
    async def begin(call: Call) -> web.StreamResponse:
        await write(call.request, web.StreamResponse(), b"begun")
        raise error

    url = await start(begin)
    async with http.get(f"{url}/it") as answer:
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
    assert b'code="cancelled"' not in metrics.exposition()[0]


async def test_a_caller_that_leaves_cancels_the_handler(
    start: Start, http: aiohttp.ClientSession, metrics: Metrics
) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def wait(call: Call) -> web.StreamResponse:
        begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.set()
        raise AssertionError

    url = await start(wait)
    asking = asyncio.ensure_future(http.get(f"{url}/it"))
    await begun.wait()
    asking.cancel()
    async with asyncio.timeout(5):
        await ended.wait()
    await start.server.drain()  # type: ignore[attr-defined]
    assert b'code="cancelled",route="/it"' in metrics.exposition()[0]


async def test_a_caller_that_does_not_read_is_cut_off(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_server, "_UNREAD_S", 0.2)
    ended = asyncio.Event()

    async def pour(call: Call) -> web.StreamResponse:
        response = web.StreamResponse()
        try:
            while True:
                await write(call.request, response, b" " * 1_000_000)
        finally:
            ended.set()

    url = await start(pour)
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as caller:
        caller.sendall(b"GET /it HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(10):
            await ended.wait()


async def test_a_drain_waits_for_what_runs_and_takes_nothing_new(start: Start, http: aiohttp.ClientSession) -> None:
    begun, release = asyncio.Event(), asyncio.Event()

    async def wait(call: Call) -> web.StreamResponse:
        begun.set()
        await release.wait()
        return web.Response(text="whole")

    url = await start(wait)
    asking = asyncio.ensure_future(http.get(f"{url}/it"))
    await begun.wait()
    draining = asyncio.ensure_future(start.server.drain())  # type: ignore[attr-defined]
    await asyncio.sleep(0)
    async with aiohttp.ClientSession() as stranger:
        with pytest.raises(aiohttp.ClientConnectorError):
            await stranger.get(f"{url}/it")
    assert not draining.done()
    release.set()
    assert await (await asking).text() == "whole"
    await draining


async def test_a_span_is_its_callers_child_and_probes_have_none(
    start: Start, http: aiohttp.ClientSession, recorded: RecordedSpans
) -> None:
    traces: list[str] = []

    async def note(call: Call) -> web.StreamResponse:
        traces.append(call.traceparent)
        return web.Response()

    url = await start(note, tracer=recorded.tracer)
    for path in ("/it", "/probe", "/nowhere"):
        async with http.get(f"{url}{path}", headers={"traceparent": PARENT}):
            pass
    (span,) = recorded.all
    assert span.name == "GET /it"
    assert span.attributes is not None
    assert span.attributes["http.response.status_code"] == 200
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
    assert traces[0].split("-")[1] == PARENT.split("-")[1]


async def test_a_port_in_use_is_told_by_the_options_name(start: Start, metrics: Metrics) -> None:
    url = await start(hello)
    other = HttpServer(
        url.removeprefix("http://"), [], error_response, incoming=Incoming(), max_body_bytes=1, metrics=metrics
    )
    with pytest.raises(ConfigError, match="--http: cannot listen"):
        await other.start()
