"""grpc.health.v1: one truth for the process (`""`) and each of its services, another for its life.

Readiness is the first: may work be sent here? `LIVENESS` is the second: should this process go on at
all? It stays SERVING while the process drains or waits for others, and ends by the engine alone.

Unlike the servicer of grpcio-health-checking, setting a status never waits for a watcher, and
watchers are ended when the server stops, so that they do not hold up its drain.

Anybody may ask, token or not, so asking costs little: gRPC reads a unary request, of any size the port
takes and for as long as its sender likes, before it calls a handler. Here both methods are streams to
gRPC, the same on the wire, whose one request is read in a waiting room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from tandem.errors import InvalidRequest
from tandem.rpc.decoding import decode_request
from tandem.rpc.handlers import Context, Handler
from tandem.rpc.waiting_room import WaitingRoom

SERVICE_NAME = "grpc.health.v1.Health"
LIVENESS = "tandem.liveness"
"""The name under which a supervisor asks whether to start the process anew."""

_MAX_REQUEST_BYTES = 1024
_LONGEST_S = 5.0
"""From the call to its first answer."""
_SEATS = 32
"""For calls without an answer; each may hold a message of the largest size that the port takes."""
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthServicer:
    """NOT_SERVING until told otherwise; for ever once closed."""

    def __init__(self, service_names: Iterable[str]) -> None:
        self._names = frozenset({"", LIVENESS, *service_names})
        self._serving = False
        self._alive = True
        self._closed = False
        self._changed = asyncio.Event()
        self._waiting_room = WaitingRoom(_SEATS, _LONGEST_S)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serves `Check` and `Watch` there."""
        handlers: dict[str, Handler] = {
            name: grpc.stream_stream_rpc_method_handler(
                behaviour, response_serializer=health_pb2.HealthCheckResponse.SerializeToString
            )
            for name, behaviour in {"Check": self._check, "Watch": self._watch}.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))

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

    async def _check(self, _requests: object, context: Context) -> None:
        """The status now; NOT_FOUND for a service that is not here."""
        async with self._waiting_room.seat():
            service = await _service_asked(context)
            if service not in self._names:
                await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
            await context.write(self._response(service))

    async def _watch(self, _requests: object, context: Context) -> None:
        """The status now and at every change."""
        async with self._waiting_room.seat():
            service = await _service_asked(context)
            told = self._response(service)
            await context.write(told)
        while True:
            changed = self._changed
            response = self._response(service)
            if response != told:
                await context.write(response)
                told = response
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


async def _service_asked(context: Context) -> str:
    """Reads the request to its end, for gRPC keeps what is sent on a stream and not read."""
    raw = await context.read()
    if not isinstance(raw, bytes):
        raise InvalidRequest("request", "is missing")
    if len(raw) > _MAX_REQUEST_BYTES:
        raise InvalidRequest("request", f"is longer than {_MAX_REQUEST_BYTES} bytes")
    if await context.read() is not grpc.aio.EOF:
        raise InvalidRequest("request", "is more than one message")
    request = decode_request(health_pb2.HealthCheckRequest.FromString, raw)
    return str(request.service)
