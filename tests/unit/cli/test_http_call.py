"""Whether an HTTP door should be left alone: it lives, and requests come through it while its router serves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Self

import pytest

from cli.http_call import HttpHealth
from shell.rpc.health import LIVENESS
from tandem.errors import Reason, Unavailable
from tandem.security.credentials import Outgoing

TIMEOUT_S = 20.0
MODELS = b'{"data": [{"id": "demo"}]}'


class Door:
    """Answers each path with a status; the model that it has is `demo`."""

    def __init__(self) -> None:
        self.statuses = {"/liveness": 200, "/v1/models": 200, "/v1/completions": 400}
        self.asked: list[str] = []

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split()[1]
        self.asked.append(path)
        writer.write(f"HTTP/1.1 {self.statuses[path]} x\r\nContent-Length: {len(MODELS)}\r\n\r\n".encode() + MODELS)
        await writer.drain()
        writer.close()


class Router:
    """Says whether it serves, or is not there."""

    def __init__(self) -> None:
        self.serves: bool | None = True

    def __call__(self) -> Self:
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None: ...

    async def serving(self, service: str, *, timeout_s: float) -> bool:
        assert service == ""
        if self.serves is None:
            raise Unavailable("Connection refused", Reason.PEER_LOST)
        return self.serves


@pytest.fixture
def door() -> Door:
    return Door()


@pytest.fixture
def router() -> Router:
    return Router()


@pytest.fixture
async def health(door: Door, router: Router) -> AsyncIterator[HttpHealth]:
    async with await asyncio.start_server(door.answer, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield HttpHealth(address, Outgoing(), router)


async def test_a_door_by_which_the_router_hears_a_request_is_well(door: Door, health: HttpHealth) -> None:
    assert await health.serving(LIVENESS, timeout_s=TIMEOUT_S)
    assert door.asked == ["/liveness", "/v1/models", "/v1/completions"]


@pytest.mark.parametrize("status", [503, 404])
async def test_a_door_that_refuses_while_its_router_serves_is_not(door: Door, health: HttpHealth, status: int) -> None:
    door.statuses["/v1/completions"] = status
    assert not await health.serving(LIVENESS, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("serves", [False, None])
async def test_a_door_whose_router_does_not_serve_is_not_at_fault(
    door: Door, health: HttpHealth, router: Router, serves: bool | None
) -> None:
    door.statuses["/v1/completions"], router.serves = 503, serves
    assert await health.serving(LIVENESS, timeout_s=TIMEOUT_S)


async def test_a_door_that_does_not_say_that_it_lives_is_not_well(door: Door, health: HttpHealth) -> None:
    door.statuses["/liveness"] = 503
    assert not await health.serving(LIVENESS, timeout_s=TIMEOUT_S)
