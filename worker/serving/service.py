"""The worker's end of `WorkerService.Connect`: one stream per router, all its requests in it.

Life of a stream: RouterHello → WorkerHello → any number of Reserve, Prefill, Grant, HandOver, Release one way and
answers the other. However it ends, the core is told `router_lost` exactly once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import Any

import grpc.aio

from shell.telemetry.logging import get_logger
from tandem.convert import group_from_proto
from tandem.errors import InternalError, InvalidRequest, TandemError
from tandem.token_ids import TokenIds
from tandem.types import GroupSpec, Handle, Incarnation
from tandem.v1 import worker_pb2, worker_pb2_grpc
from worker.core import Worker
from worker.ports import Destination
from worker.serving.cache_reports import CacheReports
from worker.serving.router_session import RouterSession

_log = get_logger(__name__)

SERVICE_NAME = "tandem.v1.WorkerService"
_HELLO_TIMEOUT_S = 5.0

Context = grpc.aio.ServicerContext[Any, Any]


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves a worker to any number of routers."""

    def __init__(
        self,
        core: Worker,
        incarnation: Incarnation,
        reports: CacheReports | None = None,
        hello_timeout_s: float = _HELLO_TIMEOUT_S,
    ) -> None:
        """`reports` tells routers what the worker's cache holds; None = it has no cache."""
        self._core = core
        self._incarnation = incarnation
        self._reports = reports
        self._hello_timeout_s = hello_timeout_s

    async def Connect(  # noqa: N802
        self, request_iterator: AsyncIterator[worker_pb2.ConnectRequest], context: Context
    ) -> None:
        """Serves a router's stream."""
        hello = await self._hello(request_iterator)
        session = RouterSession(Incarnation(hello.router_incarnation))
        _log.info("router connected", router=session.router_incarnation, peer=context.peer())
        reader = asyncio.create_task(self._read(request_iterator, session), name="connect-reader")
        writer = asyncio.create_task(self._write(context, session), name="connect-writer")
        telling = nullcontext() if self._reports is None else self._reports.telling(session.cache_news)
        try:
            with telling:
                done, _ = await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            # Before any await, however the stream ended.
            self._core.router_lost(session)
            _log.info("router disconnected", router=session.router_incarnation)
            reader.cancel()
            writer.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)

    async def _hello(self, requests: AsyncIterator[worker_pb2.ConnectRequest]) -> worker_pb2.RouterHello:
        try:
            first = await asyncio.wait_for(anext(requests, None), self._hello_timeout_s)
        except TimeoutError:
            first = None
        if first is None or first.WhichOneof("message") != "hello" or not first.hello.router_incarnation:
            raise InvalidRequest("hello", "must be the stream's first message")
        return first.hello

    async def _write(self, context: Context, session: RouterSession) -> None:
        hello = worker_pb2.WorkerHello(incarnation=self._incarnation)
        await context.write(worker_pb2.ConnectResponse(hello=hello))
        while True:
            await session.wait()
            for response in session.take():
                await context.write(response)

    async def _read(self, requests: AsyncIterator[worker_pb2.ConnectRequest], session: RouterSession) -> None:
        async for request in requests:
            match request.WhichOneof("message"):
                case "reserve":
                    await self._start(session, Handle(request.reserve.handle), request)
                case "prefill":
                    await self._start(session, Handle(request.prefill.handle), request)
                case "grant":
                    grant = request.grant
                    self._core.grant(session, Handle(grant.handle), grant.ticket, grant.kv_endpoint)
                case "hand_over":
                    over = request.hand_over
                    to = Destination(frozenset(over.choices), over.output_tokens, over.ticket, over.kv_endpoint)
                    self._core.move(session, Handle(over.handle), to)
                case "release":
                    handle = Handle(request.release.handle)
                    session.close_handle(handle)
                    self._core.release(session, handle)
                case other:
                    raise InvalidRequest(other or "message", "is not expected here")

    async def _start(self, session: RouterSession, handle: Handle, request: worker_pb2.ConnectRequest) -> None:
        """Raises InvalidRequest if the handle is in use; any other fault fails this request alone, not the stream."""
        if not session.open_handle(handle):
            raise InvalidRequest("handle", f"{handle} is in use")
        try:
            if request.HasField("reserve"):
                reserve = request.reserve
                spec = await _group(reserve.group)
                max_local_tokens = reserve.max_local_tokens if reserve.HasField("max_local_tokens") else None
                self._core.reserve(session, handle, spec, reserve.local_prefill, max_local_tokens)
            else:
                spec = await _group(request.prefill.group)
                self._core.prefill(session, handle, spec, request.prefill.destination)
        except TandemError as error:
            session.failed(handle, error)
        except Exception as error:  # noqa: BLE001 - a bug in one request's handling must not end the others
            _log.exception("a request could not be started", handle=handle)
            session.failed(handle, InternalError(f"{type(error).__name__} at the start of a request"))


async def _group(message: worker_pb2.Group) -> GroupSpec:
    """A long prompt is read in pieces; what follows on this stream waits for it, all else does not."""
    return group_from_proto(message, await TokenIds.read(message.prompt_token_ids))
