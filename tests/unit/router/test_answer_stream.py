"""How a stream of events ends: well, badly after its first event, badly before it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from router.faces.openai.errors import error_response, openai_error
from router.faces.openai.sse import Event, answer_stream
from shell.http.server import Call, HttpServer, Route
from shell.telemetry.metric import Process
from shell.telemetry.metrics import Metrics
from tandem.errors import Overloaded
from tandem.security.credentials import Incoming


@asynccontextmanager
async def answered(num_events: int, *, named: bool, fails: bool) -> AsyncGenerator[aiohttp.ClientResponse, None]:
    async def events() -> AsyncGenerator[Event, None]:
        for number in range(num_events):
            yield {"type": "count", "number": number}
        if fails:
            raise Overloaded("full")

    async def handler(call: Call) -> web.StreamResponse:
        return await answer_stream(
            call, "one", events(), lambda error: [openai_error(error) | {"type": "error"}], named=named
        )

    metrics = Metrics(Process.ROUTER, "tiny")
    options: dict[str, Any] = {"incoming": Incoming(), "max_body_bytes": 1000, "metrics": metrics}
    server = HttpServer("127.0.0.1:0", [Route("GET", "/it", handler)], error_response, **options)
    port = await server.start()
    try:
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/it") as answer:
            yield answer
    finally:
        await server.close()


@pytest.mark.parametrize("fails", [False, True])
async def test_completions_end_with_done_only_if_they_end_well(fails: bool) -> None:
    async with answered(2, named=False, fails=fails) as answer:
        lines = [line for line in (await answer.text()).splitlines() if line]
    assert answer.status == 200
    assert [json.loads(line.removeprefix("data: "))["number"] for line in lines[:2]] == [0, 1]
    (last,) = lines[2:]
    assert (last == "data: [DONE]") is not fails
    assert ("QUEUE_FULL" in last) is fails


async def test_events_with_names_bear_their_type() -> None:
    async with answered(1, named=True, fails=True) as answer:
        lines = [line for line in (await answer.text()).splitlines() if line.startswith("event")]
    assert lines == ["event: count", "event: error"]


async def test_an_error_before_the_first_event_is_a_status() -> None:
    async with answered(0, named=False, fails=True) as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
        assert (await answer.json())["error"]["code"] == "QUEUE_FULL"
