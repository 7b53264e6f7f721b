"""A port that passes calls on changes nothing of them but who calls."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from cli.pass_through import PassThrough
from tandem.rpc.tls import server_credentials
from tandem.security.credentials import Outgoing
from tandem.security.tls import ClientTls, ServerTls
from tandem.security.tokens import Tokens
from tests.pki import TOKEN, Pki

DETAILS = ("grpc-status-details-bin", b"\x08\x03\x12\x02no")
LIMIT_BYTES = 1 << 20
SERVICES = frozenset({"any.Service"})


class Router(grpc.GenericRpcHandler):
    """Echoes what it is asked, in the way that the method's name says."""

    def __init__(self) -> None:
        self.metadata: dict[str, str | bytes] = {}
        self.time_remaining_s: float | None = None
        self.cancelled = asyncio.Event()

    def service(self, details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(getattr(self, details.method.rpartition("/")[2].lower()))

    def note(self, context: Any) -> None:
        self.metadata = dict(context.invocation_metadata())
        self.time_remaining_s = context.time_remaining()

    async def echo(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        self.note(context)
        await context.send_initial_metadata((("begun", "yes"),))
        async for request in requests:
            yield request[::-1]
        context.set_trailing_metadata((("ended", "yes"), ("bytes-bin", b"\x00\xff")))

    async def refuse(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "top_p: is 7", (DETAILS,))

    async def hang(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()


@asynccontextmanager
async def passed(folder: Path) -> AsyncIterator[tuple[Router, grpc.aio.Channel]]:
    """A router with mutual TLS, and a plain channel to what passes calls on to it."""
    pki, router = Pki(folder), Router()
    shown = pki.issue()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((router,))
    port = server.add_secure_port("127.0.0.1:0", server_credentials(ServerTls(shown.cert, shown.key, pki.ca)))
    await server.start()
    outgoing = Outgoing(ClientTls(pki.ca, shown.cert, shown.key), Tokens(pki.tokens(TOKEN)))
    through = PassThrough(f"127.0.0.1:{port}", SERVICES, outgoing, LIMIT_BYTES)
    between, own_port = await through.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{own_port}") as channel:
            yield router, channel
    finally:
        await between.stop(None)
        await through.close()
        await server.stop(None)


async def test_bytes_and_metadata_go_through_both_ways_with_the_token(tmp_path: Path) -> None:
    async with passed(tmp_path) as (router, channel):
        call = channel.stream_stream("/any.Service/Echo")(
            iter((b"abc", b"", bytes(70000) + b"x")),
            metadata=(("traceparent", "00-1"), ("some-bin", b"\x00\xfe"), ("authorization", "Bearer of-the-caller")),
            timeout=60,
        )
        assert [message async for message in call] == [b"cba", b"", b"x" + bytes(70000)]
        assert dict(await call.initial_metadata())["begun"] == "yes"
        ended = dict(await call.trailing_metadata())
        assert (ended["ended"], ended["bytes-bin"]) == ("yes", b"\x00\xff")
    assert router.metadata["traceparent"] == "00-1"
    assert router.metadata["some-bin"] == b"\x00\xfe"
    assert router.metadata["authorization"] == f"Bearer {TOKEN}"
    assert router.time_remaining_s is not None
    assert 0 < router.time_remaining_s <= 60.2  # gRPC rounds up to a tenth, on each of two ways


async def test_a_call_of_one_message_is_passed_on_too(tmp_path: Path) -> None:
    async with passed(tmp_path) as (_, channel):
        assert await channel.unary_unary("/any.Service/Echo")(b"abc") == b"cba"
        assert [each async for each in channel.unary_stream("/any.Service/Echo")(b"abc")] == [b"cba"]


async def test_a_refusal_comes_with_its_status_and_details(tmp_path: Path) -> None:
    async with passed(tmp_path) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary("/any.Service/Refuse")(b"abc")
    assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "top_p: is 7")
    assert DETAILS in tuple(refused.value.trailing_metadata())


async def test_other_services_are_not_there(tmp_path: Path) -> None:
    async with passed(tmp_path) as (router, channel):
        for method in ("/another.Service/Echo", "/any.Service.More/Echo", "/Echo", "/any.Service/x/Echo"):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary(method)(b"abc")
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert router.metadata == {}


async def test_a_caller_that_leaves_ends_the_call_to_the_router(tmp_path: Path) -> None:
    async with passed(tmp_path) as (router, channel):
        call = channel.unary_stream("/any.Service/Hang")(b"abc")
        assert await call.read() == b"first"
        call.cancel()
        async with asyncio.timeout(20):
            await router.cancelled.wait()


async def test_a_deadline_is_the_callers(tmp_path: Path) -> None:
    async with passed(tmp_path) as (router, channel):
        await channel.unary_unary("/any.Service/Echo")(b"abc")  # else slow connections take the time
        call = channel.unary_stream("/any.Service/Hang")(b"abc", timeout=2.0)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            [_ async for _ in call]
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(20):
            await router.cancelled.wait()


async def test_renewed_certificates_are_used_from_the_next_call_on(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    shown = pki.issue()
    through = PassThrough("127.0.0.1:1", SERVICES, Outgoing(ClientTls(pki.ca, shown.cert, shown.key)), LIMIT_BYTES)
    before = through._connected()
    assert through._connected() is before
    renewed = pki.issue()
    os.replace(renewed.key, shown.key)
    os.replace(renewed.cert, shown.cert)
    assert through._connected() is not before
    await through.close()


async def test_a_router_that_is_away_is_unavailable(tmp_path: Path) -> None:
    through = PassThrough("127.0.0.1:1", SERVICES, Outgoing(), LIMIT_BYTES)
    server, port = await through.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary("/any.Service/Echo")(b"abc")
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    await server.stop(None)
    await through.close()
