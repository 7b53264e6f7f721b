"""grpc.health.v1: readiness for the process (`""`) and each of its services, and the process's life.

Readiness: may work be sent here? `LIVENESS`: should this process go on at all? It stays SERVING while the
process drains or waits for others; only an engine that has stopped ends it.

The servicer of grpcio-health-checking 1.85 does not keep Watch's promise: when one watcher leaves, the others hear
no further change, and one that does not read its stream stops every change of status. So only its messages and
registration are used.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shell.rpc.handlers import Context

SERVICE_NAME = "grpc.health.v1.Health"
LIVENESS = "tandem.liveness"
"""The name under which a supervisor asks whether to restart the process."""


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
        """Readiness."""
        return self._serving

    @property
    def alive(self) -> bool:
        """What is reported as `LIVENESS`."""
        return self._alive

    def set_serving(self, serving: bool) -> None:
        """Wakes every watcher, without waiting for any. A no-op once closed."""
        if not self._closed and serving != self._serving:
            self._serving = serving
            self._wake()

    def set_alive(self, alive: bool) -> None:
        """Whether the engine makes progress. Wakes every watcher."""
        if alive != self._alive:
            self._alive = alive
            self._wake()

    def close(self) -> None:
        """Not ready for good; every Watch reports that and ends."""
        self._closed = True
        self._serving = False
        self._wake()

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        """The status now; NOT_FOUND for a service that is not here."""
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return self._response(request.service)

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status now and after every change."""
        told = None
        while True:
            changed = self._changed
            response = self._response(request.service)
            if response != told:
                yield response
                told = response
            elif self._closed:
                return
            else:
                await changed.wait()

    def _response(self, service: str) -> health_pb2.HealthCheckResponse:
        if service not in self._names:
            return health_pb2.HealthCheckResponse(status="SERVICE_UNKNOWN")
        good = self._alive if service == LIVENESS else self._serving
        return health_pb2.HealthCheckResponse(status="SERVING" if good else "NOT_SERVING")

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
