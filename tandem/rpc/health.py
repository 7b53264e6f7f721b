"""grpc.health.v1: one truth for the process (`""`) and each of its services, another for its life.

Readiness is the first: may work be sent here? `LIVENESS` is the second: should this process go on at
all? It stays SERVING while the process drains or waits for others, and ends by the engine alone.

Unlike the servicer of grpcio-health-checking, setting a status never waits for a watcher, and
watchers are ended when the server stops, so that they do not hold up its drain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVICE_NAME = "grpc.health.v1.Health"
LIVENESS = "tandem.liveness"
"""The name under which a supervisor asks whether to start the process anew."""

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # has no types
    """NOT_SERVING until told otherwise; for ever once closed."""

    def __init__(self, service_names: Iterable[str]) -> None:
        self._names = frozenset({"", LIVENESS, *service_names})
        self._serving = False
        self._alive = True
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def serving(self) -> bool:
        """What is being told."""
        return self._serving

    @property
    def alive(self) -> bool:
        """What is being told under `LIVENESS`."""
        return self._alive

    def set_serving(self, serving: bool) -> None:
        """Tells every watcher. A no-op once closed."""
        if not self._closed and serving != self._serving:
            self._serving = serving
            self._wake()

    def set_alive(self, alive: bool) -> None:
        """Whether the process does what it is there for. Tells every watcher of `LIVENESS`."""
        if alive != self._alive:
            self._alive = alive
            self._wake()

    def close(self) -> None:
        """Not ready for good, and the end of every Watch."""
        self._closed = True
        self._serving = False
        self._wake()

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        """The status now; NOT_FOUND for a service that is not here."""
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return self._response(request.service)

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """The status now and at every change."""
        told = None
        while True:
            changed = self._changed
            response = self._response(request.service)
            if response.status != told:
                await context.write(response)
                told = response.status
            elif self._closed:
                return
            else:
                await changed.wait()

    def _response(self, service: str) -> health_pb2.HealthCheckResponse:
        if service not in self._names:
            return health_pb2.HealthCheckResponse(status=_SERVICE_UNKNOWN)
        good = self._alive if service == LIVENESS else self._serving
        return health_pb2.HealthCheckResponse(status=_SERVING if good else _NOT_SERVING)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
