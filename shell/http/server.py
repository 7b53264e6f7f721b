"""The shell of an HTTP server: limits, TLS, tokens, CORS, traces, counts, errors, drain. aiohttp does the rest.

    connection ─▶ CORS ─▶ token ─▶ route ─▶ span, count ─▶ handler ─▶ answer
                    any TandemError on the way ─▶ the face's error body

A handler whose caller leaves is cancelled. A bug is answered with an id, which the log explains. Knows no protocol.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from aiohttp import web
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

from shell.http.silent import SILENT
from shell.rpc.address import is_taken
from shell.rpc.status import bug_logged
from shell.telemetry import metric_names
from shell.telemetry.logging import get_logger
from shell.telemetry.metrics import Metrics, Reading
from shell.telemetry.trace_context import (
    CANCELLED,
    ERROR_TYPE,
    TRACEPARENT,
    TRACESTATE,
    context_from_metadata,
    trace_of_call,
)
from tandem.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    TandemError,
    Unauthenticated,
)
from tandem.security.credentials import Incoming
from tandem.security.tokens import Identity

_log = get_logger(__name__)

_IDLE_S = 75.0
"""A connection that waits for its next request is closed after this time."""
_BODY_S = 60.0
"""A request whose body has not arrived after this time is refused."""
_UNREAD_S = 65.0
"""A connection that takes no byte of an answer for this time is cut: the router ended the request before."""
_MAX_BODY_BYTES_HELD = 512 * 1024 * 1024
"""Bytes of all request bodies that are read or answered at a time."""
_STOP_S = 1.0
_NO_ROUTE = "none"
"""Reported instead of a path without a route, which may be the caller's invention."""
ANSWERED = web.RequestKey("answered", int)
"""Key of a request: the status of an answer that has left whole."""
_BEGUN = web.RequestKey("begun", bool)
"""Key of a request whose answer has begun to leave."""
_PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, POST",
    "Access-Control-Allow-Headers": "*, Authorization",
    "Access-Control-Max-Age": "600",
}


@dataclass(frozen=True, slots=True)
class Call:
    """One request, with whose it is and the trace that it belongs to."""

    request: web.Request
    identity: Identity
    traceparent: str
    tracestate: str
    hold: Callable[[int], None]
    """Counts bytes of the body, until the request ends. Raises InvalidRequest, Overloaded."""

    @property
    def peer(self) -> str:
        """Returns where the call came from, for logs."""
        return self.request.remote or ""

    async def body(self) -> bytes:
        """Reads a JSON body. Raises InvalidRequest, Overloaded, DeadlineExceeded."""
        if self.request.content_type != "application/json":
            raise InvalidRequest("Content-Type", "must be application/json")
        if "Content-Encoding" in self.request.headers:
            raise InvalidRequest("Content-Encoding", "must be absent: bodies are not decompressed")
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_S):
                async for piece in self.request.content.iter_any():
                    self.hold(len(piece))
                    body += piece
        except TimeoutError:
            raise DeadlineExceeded(f"the body did not arrive within {_BODY_S:g} s") from None
        return bytes(body)


Handler = Callable[[Call], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Route:
    """What answers a method and path. `{name}` in a path stands for one or more characters without a slash."""

    method: str
    path: str
    handler: Handler
    is_probe: bool = False
    """Whether it needs no token and makes no span."""


class HttpServer:
    """A listening HTTP server of one face."""

    def __init__(
        self,
        listen: str,
        routes: Sequence[Route],
        error_response: Callable[[str, TandemError], web.Response],
        *,
        incoming: Incoming,
        max_body_bytes: int,
        metrics: Metrics,
        tracer: Tracer | None = None,
        allowed_origins: Sequence[str] = (),
        shares_port: bool = False,
    ) -> None:
        """`error_response` answers an error for the path at which it was met.

        `allowed_origins`: web origins whose pages may call; `*` = all. `shares_port`: other processes listen there too.
        """
        self._listen = listen
        self._routes = {(route.method, route.path): route for route in routes}
        self._error_response = error_response
        self._incoming = incoming
        self._max_body_bytes = max_body_bytes
        self._tracer = tracer
        self._origins = frozenset(allowed_origins)
        self._shares_port = shares_port
        self._held_bytes = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._in_flight: Counter[str] = Counter()
        self._counted = metrics.counter(metric_names.HTTP_REQUESTS)
        metrics.add_reader(self._read, metric_names.HTTP_IN_FLIGHT)
        self._runner: web.AppRunner | None = None

    async def start(self) -> int:
        """Listens; returns the port. Raises ConfigError if the address cannot be had."""
        app = web.Application()
        app.on_response_prepare.append(self._add_headers)
        for path in {path for _, path in self._routes}:
            app.router.add_route("*", path, self._handle)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=SILENT,
            handler_cancellation=True,
            auto_decompress=False,  # a bomb costs seconds, also behind a refusal: aiohttp reads what is left of a body
            keepalive_timeout=_IDLE_S,
            shutdown_timeout=_STOP_S,
        )
        await self._runner.setup()
        host, _, port = self._listen.rpartition(":")
        tls = self._incoming.tls
        context = None if tls is None else tls.serving_context()
        try:
            if is_taken(self._listen, shared=self._shares_port):
                raise OSError(0, "the port is in use")
            site = web.TCPSite(
                self._runner, host.strip("[]"), int(port), ssl_context=context, reuse_port=self._shares_port or None
            )
            await site.start()
        except OSError as error:
            raise ConfigError("--http", f"cannot listen on {self._listen}: {error.strerror or error}") from error
        bound = int(self._runner.addresses[0][1])
        _log.info("http", address=f"{host}:{bound}")
        return bound

    async def drain(self) -> None:
        """Takes no new connections; returns once no request is running."""
        for site in () if self._runner is None else tuple(self._runner.sites):
            await site.stop()
        await self._idle.wait()

    async def close(self) -> None:
        """Cuts every connection. Idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.method == "OPTIONS" and self._cross_origin(request):
            return web.Response(status=204, headers=_PREFLIGHT)
        resource = request.match_info.route.resource
        path = _NO_ROUTE if resource is None or resource.canonical == "/{path}" else resource.canonical
        route = self._routes.get(("GET" if request.method == "HEAD" else request.method, path))
        with self._observed(request, path, route):
            response = await self._answer(request, path, route)
            request[ANSWERED] = response.status
            return response

    async def _answer(self, request: web.Request, path: str, route: Route | None) -> web.StreamResponse:
        try:
            identity = Identity() if route is not None and route.is_probe else self._identity(request)
            if route is None:
                raise self._no_route(request.path, path)
            trace = trace_of_call(_metadata(request))
            with self._holding(request) as hold:
                return await route.handler(Call(request, identity, *trace, hold))
        except TandemError as error:
            response = self._error_response(request.path, error)
        except RecursionError:  # nothing but a caller's JSON is nested so
            response = self._error_response(request.path, InvalidRequest("body", "is nested too deeply"))
        except ConnectionError as error:  # the caller is gone
            raise asyncio.CancelledError from error
        except Exception as error:  # noqa: BLE001  (the request's root)
            response = self._error_response(request.path, bug_logged(_log, "http request failed", error))
        if _BEGUN in request:  # a second head would be read as a part of the answer: the connection is cut
            request[ANSWERED] = response.status
            raise asyncio.CancelledError
        return response

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        request[_BEGUN] = True
        response.headers["Server"] = "tandem"
        response.headers.update(self._cross_origin(request))

    def _identity(self, request: web.Request) -> Identity:
        tokens = self._incoming.tokens
        if tokens is None:
            return Identity()
        shown = request.headers.get("Authorization")
        if shown is None and (key := request.headers.get("x-api-key")) is not None:
            shown = f"Bearer {key}"
        identity = tokens.identify(shown)
        if identity is None:
            raise Unauthenticated("a token of the server's --token-file is needed, as API key")
        return identity

    def _no_route(self, asked: str, path: str) -> TandemError:
        methods = sorted(route.method for route in self._routes.values() if route.path == path)
        if methods:
            return NoRoute(f"{path} takes {', '.join(methods)}", status=405)
        return NoRoute(f"there is no {asked[:256]} here; /openapi.json lists what there is", status=404)

    def _cross_origin(self, request: web.Request) -> Mapping[str, str]:
        origin = request.headers.get("Origin")
        if origin is None or not self._origins & {origin, "*"}:
            return {}
        return {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": "*", "Vary": "Origin"}

    @contextmanager
    def _holding(self, request: web.Request) -> Iterator[Callable[[int], None]]:
        """Yields what counts bytes of the body as they arrive, until the block is left.

        Raises InvalidRequest for a body that is announced as too large; what counts raises it too, and Overloaded.
        """
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            if held + size > self._max_body_bytes:
                raise InvalidRequest("body", f"exceeds the limit of {self._max_body_bytes} bytes")
            if self._held_bytes + size > _MAX_BODY_BYTES_HELD:
                raise Overloaded(f"{self._held_bytes} bytes of request bodies are held already")
            held += size
            self._held_bytes += size

        if (request.content_length or 0) > self._max_body_bytes:
            raise InvalidRequest("body", f"{request.content_length} bytes exceed the limit of {self._max_body_bytes}")
        try:
            yield hold
        finally:
            self._held_bytes -= held

    @contextmanager
    def _observed(self, request: web.Request, path: str, route: Route | None) -> Iterator[None]:
        """Counts the request, and makes its span; one that ends without a status in `ANSWERED` was cancelled."""
        self._in_flight[path] += 1
        self._idle.clear()
        span: AbstractContextManager[Span | None] = nullcontext()
        if self._tracer is not None and route is not None and not route.is_probe:
            span = self._tracer.start_as_current_span(
                f"{request.method} {path}",
                context_from_metadata(_metadata(request)),
                SpanKind.SERVER,
                {"http.request.method": request.method, "http.route": path, "url.scheme": request.scheme},
                record_exception=False,  # its message may quote the caller
                set_status_on_exception=False,
            )
        try:
            with span as entered:
                try:
                    yield
                finally:
                    _end_span(entered, request.get(ANSWERED))
        finally:
            self._in_flight[path] -= 1
            if not self._in_flight.total():
                self._idle.set()
            self._counted.add(1, path, str(request.get(ANSWERED, CANCELLED)))

    def _read(self) -> Iterable[Reading]:
        return [Reading(metric_names.HTTP_IN_FLIGHT, count, (path,)) for path, count in self._in_flight.items()]


class NoRoute(TandemError):
    """No handler for the path, or not for the method."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


async def write(request: web.Request, response: web.StreamResponse, data: bytes | None) -> None:
    """Writes a part of an answer, its head first; None = its end. Cuts a connection that takes no byte for long.

    Raises ConnectionError once the caller is gone.
    """
    try:
        async with asyncio.timeout(_UNREAD_S):
            if not response.prepared:
                await response.prepare(request)
            if data is not None:
                await response.write(data)
                return
            await response.write_eof()
            request[ANSWERED] = response.status
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the answer is not read") from None


def _metadata(request: web.Request) -> list[tuple[str, str | bytes]]:
    return [(key, value) for key in (TRACEPARENT, TRACESTATE) for value in request.headers.getall(key, ())]


def _end_span(span: Span | None, status: int | None) -> None:
    if span is None:
        return
    if status is not None:
        span.set_attribute("http.response.status_code", status)
    if status is None or status >= 400:
        span.set_attribute(ERROR_TYPE, CANCELLED if status is None else str(status))
    if status is not None and status >= 500:
        span.set_status(Status(StatusCode.ERROR))
