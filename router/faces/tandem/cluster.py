"""The cluster's two services: RegistryService, where workers hold their leases, and ClusterService for operators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from router.serving_set import SetId
from router.status import RouterStatus
from router.workers import Workers
from shell.rpc.authentication import caller_identity
from shell.telemetry.logging import get_logger
from tandem.convert import info_from_proto, load_from_proto, status_to_proto
from tandem.errors import HandshakeMismatch, InvalidRequest
from tandem.security.credentials import Outgoing
from tandem.types import Incarnation, WorkerId, WorkerInfo
from tandem.v1 import cluster_pb2, cluster_pb2_grpc, registry_pb2, registry_pb2_grpc

_log = get_logger(__name__)

CLUSTER_SERVICE = "tandem.v1.ClusterService"
REGISTRY_SERVICE = "tandem.v1.RegistryService"

Context = grpc.aio.ServicerContext[Any, Any]


class RegistryServicer(registry_pb2_grpc.RegistryServiceServicer):
    """Each worker's Register stream is its lease; for each there is the event that has news for its worker."""

    def __init__(self, workers: Workers, outgoing: Outgoing) -> None:
        """`outgoing`: credentials for calls to workers."""
        self._workers = workers
        self._outgoing = outgoing
        self._news: dict[Incarnation, asyncio.Event] = {}

    def order_drain(self, worker_id: WorkerId) -> None:
        """Gives the worker no new work and tells it, on its next stream if none stands. Raises InvalidRequest."""
        event = self._news.get(self._workers.order_drain(worker_id).incarnation)
        if event is not None:
            event.set()

    async def Register(self, request_iterator: AsyncIterator[registry_pb2.RegisterRequest], context: Context) -> None:
        """Serves a worker's stream. Raises HandshakeMismatch that names the field, InvalidRequest, Unavailable."""
        info = await self._introduction(request_iterator)
        await self._check_address(info)
        owner = caller_identity().name
        try:
            self._workers.register(info, owner)
        except HandshakeMismatch as mismatch:
            _log.warning("worker refused: it serves another model", worker_id=info.worker_id, error=mismatch.message)
            raise
        news = self._news[info.incarnation] = asyncio.Event()
        try:
            await self._keep(info, owner, news, request_iterator, context)
        finally:
            # A newer stream of the same life may have taken over: then the lease is its own.
            if self._news.get(info.incarnation) is news:
                del self._news[info.incarnation]
                self._workers.deregister(info)

    async def _keep(
        self,
        info: WorkerInfo,
        owner: str,
        news: asyncio.Event,
        requests: AsyncIterator[registry_pb2.RegisterRequest],
        context: Context,
    ) -> None:
        """Grants the lease; then heartbeats one way, and what changes for the worker the other."""
        granted = self._response(info)
        await context.write(granted)
        orders = asyncio.create_task(self._send_orders(info, granted, news, context), name=f"to {info.worker_id}")
        set_id, was_apart = SetId.of(info), bool(granted.set_apart)
        try:
            async for request in requests:
                if request.WhichOneof("message") != "load":
                    raise InvalidRequest("message", "must be load after the first")
                self._workers.heartbeat(info, load_from_proto(request.load), owner)
                if (set_id in self._workers.serving.apart) is not was_apart:
                    was_apart = not was_apart
                    news.set()
        finally:
            orders.cancel()

    async def _introduction(self, requests: AsyncIterator[registry_pb2.RegisterRequest]) -> WorkerInfo:
        try:
            async with asyncio.timeout(self._workers.lease_s):
                first = await anext(requests, None)
        except TimeoutError:
            first = None
        if first is None or first.WhichOneof("message") != "info":
            raise InvalidRequest("info", "must be the stream's first message")
        try:
            return info_from_proto(first.info)
        except KeyError as error:
            raise InvalidRequest("info.role", "is not known to this version") from error

    async def _check_address(self, info: WorkerInfo) -> None:
        if await asyncio.to_thread(self._outgoing.shows_token_in_clear, info.address):
            _log.warning(
                "worker refused: the token would cross the network in clear; give --tls-cert, --tls-key and --tls-ca, "
                "or else --insecure",
                worker_id=info.worker_id,
                address=info.address,
            )
            raise InvalidRequest("info.address", "this router's token would cross the network to it in clear")

    async def _send_orders(
        self, info: WorkerInfo, sent: registry_pb2.RegisterResponse, news: asyncio.Event, context: Context
    ) -> None:
        while True:
            response = self._response(info)
            if (response.drain, response.set_apart) != (sent.drain, sent.set_apart):
                await context.write(response)
                sent = response
            await news.wait()
            news.clear()

    def _response(self, info: WorkerInfo) -> registry_pb2.RegisterResponse:
        workers = self._workers
        return registry_pb2.RegisterResponse(
            lease_seconds=workers.lease_s,
            heartbeat_seconds=workers.heartbeat_s,
            drain=workers.drain_ordered(info),
            set_apart=workers.serving.why_apart(SetId.of(info)),
        )


class ClusterServicer(cluster_pb2_grpc.ClusterServiceServicer):
    """What this router knows of the cluster, and the order to drain a worker."""

    def __init__(self, status: RouterStatus, registrations: RegistryServicer) -> None:
        self._status = status
        self._registrations = registrations

    async def GetStatus(self, request: cluster_pb2.GetStatusRequest, context: Context) -> cluster_pb2.GetStatusResponse:
        """Every worker by name, the admission queue, and whether a request could be served."""
        return status_to_proto(self._status.cluster())

    async def Drain(self, request: cluster_pb2.DrainRequest, context: Context) -> cluster_pb2.DrainResponse:
        """Raises InvalidRequest for an unknown name."""
        self._registrations.order_drain(WorkerId(request.worker_id))
        return cluster_pb2.DrainResponse()
